/* Connects the page's controls. The other files: server.js (calls), settings.js (a request's fields), chat.js and
   compare.js (the two views), pictures.js (those of a message), reply.js, tokens.js and markdown.js (a reply), conversations.js and storage.js (what the
   browser keeps), status.js (the header), running.js (one thing at a time). */

import * as chat from "./chat.js";
import * as comparison from "./compare.js";
import { $ } from "./page.js";
import * as pictures from "./pictures.js";
import { busy, stop } from "./running.js";
import * as settings from "./settings.js";
import { poll } from "./status.js";
import { watch } from "./tokens.js";

function view(name) {
  document.body.dataset.view = name;
  for (const each of ["chat", "compare"]) {
    $(each).hidden = each !== name;
    $(`to-${each}`).setAttribute("aria-pressed", each === name);
  }
  $("order-field").hidden = name !== "compare";
  $("prompt").placeholder = name === "chat" ? "Message" : "A prompt to run both ways";
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy()) return stop();
  const text = $("prompt").value.trim();
  if (!text && !(pictures.any() && document.body.dataset.view === "chat")) return;
  if (document.body.dataset.view !== "chat") return comparison.compare(text);
  $("prompt").value = "";
  chat.send(text, pictures.take());
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("prompt").value && document.body.dataset.view === "chat") {
    event.preventDefault();
    return chat.editLast();
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!busy()) $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("#settings:popover-open, #sidebar:popover-open")) stop();
  if (event.key === "/" && !event.target.matches("input, textarea, select")) {
    event.preventDefault();
    $("prompt").focus();
  }
});
document.addEventListener("visibilitychange", poll);
document.addEventListener("running", poll);
$("to-chat").addEventListener("click", () => view("chat"));
$("to-compare").addEventListener("click", () => view("compare"));
$("new-chat").addEventListener("click", () => {
  view("chat");
  chat.begin();
});
$("examples").addEventListener("click", (event) => {
  if (event.target.matches("button") && !busy()) chat.send(event.target.textContent, []);
});

/* Conversations stand beside the chat where there is room, and come up over it where there is none. */
const wide = matchMedia("(min-width: 64rem)");
const place = () => (wide.matches ? $("sidebar").removeAttribute("popover") : $("sidebar").setAttribute("popover", ""));
wide.addEventListener("change", place);
place();

settings.open((id) => {
  if (id === "key") poll();
  if (id === "order") comparison.start();
  if (id === "as-tokens") chat.redraw();
});
watch(document.querySelector("main"));
chat.start();
pictures.start();
comparison.start();
poll();
