/* Tokens on the page: coloured by who proposed them, with a card that tells more of the one pointed at.

   A token is {text, source, round, place, logprob, top}. A piece is [text, token]: characters that are shown, and the
   token that they came from, or null. */

import { $, element, share } from "./page.js";

export const SOURCES = ["accepted", "corrected", "bonus", "plain"];

export function span(text, token) {
  if (!token) return document.createTextNode(text);
  const made = element("span", `t ${token.source}`, text);
  made.token = token;
  return made;
}

/* Colours rendered text. The text of each node is looked for in what the model wrote, behind the last found. A line
   that isn't there word for word, because of an escape for example, is matched by its characters. */
export function colour(fragment, pieces) {
  const source = pieces.map(([text]) => text).join("");
  const owners = [];
  for (const [text, token] of pieces) for (let i = 0; i < text.length; i++) owners.push(token);
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement?.closest(".bar")) nodes.push(walker.currentNode);
  let position = 0;
  for (const node of nodes) {
    const owned = [];
    for (const line of node.data.split(/(?<=\n)/)) {
      const text = line.replace(/\n$/, ""); // code ends in a line break that the model may not have written
      const at = source.indexOf(text, position);
      if (at >= 0 && text.trim()) {
        for (let i = 0; i < line.length; i++) owned.push(source[at + i] === line[i] ? owners[at + i] : null);
        position = at + text.length;
      } else {
        for (const char of line.split("")) {
          const found = source.indexOf(char, position);
          const near = found >= 0 && found - position < 16 && char.trim();
          owned.push(near ? owners[found] : null);
          if (near) position = found + 1;
        }
      }
    }
    if (owned.some(Boolean)) node.replaceWith(...spans(node.data, owned));
  }
}

function spans(text, owners) {
  const made = [];
  for (let start = 0, end = 1; start < text.length; start = end++) {
    while (end < text.length && owners[end] === owners[start]) end += 1;
    made.push(span(text.slice(start, end), owners[start]));
  }
  return made;
}

/* ---- The card -------------------------------------------------------------------------------------------------- */

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";
const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100%" : value >= 0.1 ? `${value.toFixed(1)}%` : "<0.1%";
};

/* How a token came to be, in a sentence. `drafts`: how many each round of the reply had, if all had as many. */
export function story({ source, round, place }, drafts) {
  const behind = drafts ? drafts - place : 0;
  const dropped = behind > 0 ? ` The ${behind === 1 ? "draft" : `${behind} drafts`} behind it fell with it.` : "";
  if (source === "accepted") return `Draft ${place} of round ${round}: the model accepted it.`;
  if (source === "corrected")
    return `Draft ${place} of round ${round} was rejected. The model wrote this in its place.${dropped}`;
  if (source === "bonus")
    return `The model's own, after it had accepted ${place === 2 ? "the draft" : `all ${place - 1} drafts`} of round ${round}.`;
  return round ? "The model's own; nothing was drafted." : "The first token; it comes with the prompt.";
}

let pointed = null;

function show(node) {
  pointed?.classList.remove("pointed");
  pointed = node;
  if (!node) return $("card").hidePopover();
  node.classList.add("pointed");
  const { token } = node;
  const card = $("card");
  card.replaceChildren(
    element("b", `t ${token.source}`, visible(token.text)),
    element("span", "small", token.source),
    element("p", "", story(token, node.closest(".reply").reply.drafts)),
  );
  if (token.top?.length) {
    const chances = element("dl", "chances");
    const listed = token.top.some(([text]) => text === token.name) ? token.top : [...token.top, [token.name, token.logprob]];
    for (const [text, logprob] of listed) {
      const row = element("div", text === token.name ? "chosen" : "");
      row.append(element("dt", "", visible(text)), element("dd", "", percent(logprob)));
      share(row, Math.exp(logprob));
      chances.append(row);
    }
    card.append(element("p", "small", "The model's probabilities here:"), chances);
  }
  card.showPopover();
  const { left, top, bottom } = node.getClientRects()[0];
  const { width, height } = card.getBoundingClientRect();
  card.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  card.style.top = `${bottom + height + 12 < innerHeight ? bottom + 6 : Math.max(8, top - height - 6)}px`;
}

/* The mouse points at tokens, a finger taps them, and the arrow keys step through the text that has the focus. */
export function watch(root) {
  const token = (event) => (event.target.closest ? event.target.closest(".t") : null);
  const at = (event) => (token(event)?.token ? token(event) : null);
  root.addEventListener("pointerover", (event) => at(event) !== pointed && show(at(event)));
  root.addEventListener("pointerleave", () => show(null));
  root.addEventListener("click", (event) => at(event) && show(at(event)));
  root.addEventListener("scroll", () => pointed && show(null));
  root.addEventListener("focusout", () => pointed && show(null));
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !event.target.matches(".text")) return;
    const all = [...event.target.querySelectorAll(".t")];
    const next = all[all.indexOf(pointed) + step] ?? (pointed ? null : all.at(step < 0 ? -1 : 0));
    if (!next) return;
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    show(next);
  });
}
