/* Conversations, kept in this browser, each under a name of its own. The newest comes first.

   A conversation is {id, title, changed, messages}. A message is as the API takes it; `shown` is the page's own. */

import { $, button, element, tell } from "./page.js";
import { textOf } from "./pictures.js";
import { names, read, remove, write } from "./storage.js";

const NAME = "conversation ";
let all = new Map(); // those of this tab that could be stored, and those that couldn't

export function load() {
  const stored = names().filter((name) => name.startsWith(NAME)).map(read);
  all = new Map(stored.filter((each) => Array.isArray(each?.messages)).map((each) => [each.id, each]));
}

export const begin = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] });

/* Keeps a conversation. Where the storage is full, the oldest ones lose what is known of their tokens. */
export function keep(conversation) {
  const first = textOf(conversation.messages.find((message) => message.role === "user")?.content);
  Object.assign(conversation, { title: first.trim().slice(0, 80), changed: Date.now() });
  all.set(conversation.id, conversation);
  const store = () => write(NAME + conversation.id, conversation);
  const oldest = [...all.values()].sort((a, b) => a.changed - b.changed);
  let stored = store();
  while (!stored && oldest.length) {
    const each = oldest.shift();
    each.messages = each.messages.map(bare);
    write(NAME + each.id, each);
    stored = store();
  }
  if (!stored) tell("The browser has no room to keep this conversation.", "Dismiss", () => {});
}

const bare = (message) => {
  if (!message.shown) return message;
  const pieces = (list) => list && [[list.map(([text]) => text).join(""), -1]];
  const { answer, thoughts, ...rest } = message.shown;
  return { ...message, shown: { ...rest, tokens: [], answer: pieces(answer), thoughts: pieces(thoughts) } };
};

/* Messages as the API takes them. */
export const plain = (messages) => messages.map(({ shown: _, ...message }) => message);

/* Draws the list. `current` is the conversation that is open; `opened` and `deleted` are called with one. */
export function list(current, opened, deleted) {
  const sorted = [...all.values()].sort((a, b) => b.changed - a.changed);
  $("conversations").replaceChildren(
    ...sorted.map((each) => {
      const item = element("li");
      const title = button(each.title || "Untitled", "", () => opened(each));
      title.setAttribute("aria-current", each.id === current.id);
      title.title = each.title;
      const gone = button("×", `Delete the conversation “${each.title}”`, () => {
        all.delete(each.id);
        remove(NAME + each.id);
        deleted(each);
        tell("Deleted.", "Undo", () => (keep(each), opened(each)));
      });
      item.append(title, gone);
      return item;
    }),
  );
  $("none-yet").hidden = sorted.length > 0;
}
