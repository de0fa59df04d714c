/* Pictures of messages: chosen, pasted or dropped, shown beside the text until they are sent. */

import { $, button, element, tell } from "./page.js";

let waiting = []; // data: URLs

/* A message's content with its pictures, as the API takes it. */
export const content = (text, urls) =>
  urls.length
    ? [...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])]
    : text;

/* The text and the pictures of a content. */
export const textOf = (content) =>
  Array.isArray(content) ? content.map((part) => part.text ?? "").join("") : (content ?? "");
export const urlsOf = (content) =>
  Array.isArray(content) ? content.filter((part) => part.image_url).map((part) => part.image_url.url) : [];

export const any = () => waiting.length > 0;

/* The pictures that wait, which then wait no more. */
export function take() {
  const taken = waiting;
  put([]);
  return taken;
}

/* Has these pictures wait to be sent. */
export function put(urls) {
  waiting = urls;
  $("pictures").replaceChildren(...urls.map((url, at) => {
    const holder = element("span", "picture");
    holder.append(shown(url), button("×", `Leave out picture ${at + 1}`, () => put(waiting.filter((_, i) => i !== at))));
    return holder;
  }));
  $("pictures").hidden = !urls.length;
}

export function shown(url) {
  const made = element("img");
  made.src = url;
  made.alt = "A picture of the message";
  return made;
}

async function add(files) {
  const read = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });
  const pictures = [...files].filter((file) => file.type.startsWith("image/"));
  if (files.length > pictures.length) tell("Only pictures can be sent.", "Dismiss", () => {});
  const urls = await Promise.all(pictures.map(read));
  put([...waiting, ...urls]);
}

export function start() {
  $("picture").addEventListener("change", () => {
    add($("picture").files);
    $("picture").value = "";
  });
  $("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}
