/* The chat: conversations, turns, and what can be done with a turn. */

import * as conversations from "./conversations.js";
import { $, button, copier, element } from "./page.js";
import * as pictures from "./pictures.js";
import { Reply } from "./reply.js";
import { busy, follow, stop, whileRunning } from "./running.js";
import { FieldError, body, goTo } from "./settings.js";
import { context, drafter } from "./status.js";

let current = conversations.begin();

/* Sends a message of the user with pictures, in place of all from `at` on. */
export function send(text, urls, at = current.messages.length) {
  const content = pictures.content(text, urls);
  return answer([...current.messages.slice(0, at), { role: "user", content }], content);
}

/* Has `messages` answered. If nothing comes of it, the conversation stays as it was, and `sent` can be sent again. */
async function answer(messages, sent) {
  if (busy()) return;
  const conversation = current;
  draw(messages);
  const turn = element("div", "turn reply");
  $("log").append(turn);
  document.querySelector("main").scrollTop = 1e9;
  let request;
  try {
    request = body(conversations.plain(messages));
  } catch (error) {
    new Reply(turn).end(error);
    failed(turn, sent);
    if (error instanceof FieldError) goTo(error.field);
    return;
  }
  await whileRunning(async (signal) => {
    $("log").setAttribute("aria-busy", "true");
    const reply = new Reply(turn);
    const error = await reply.run(request, signal, follow);
    $("log").removeAttribute("aria-busy");
    if (reply.anything && !conversation.deleted) {
      conversation.messages = [...messages, reply.message()];
      conversations.keep(conversation);
      list();
    }
    if (current !== conversation) return; // another was opened meanwhile
    if (reply.anything) finishLast(request);
    else if (error) failed(turn, sent);
    if (reply.usage) context(reply.usage);
    if (error?.status === 401) goTo("key");
    follow();
  });
}

/* Shows the conversation as it still is, below it the error, and gives the message back. */
function failed(turn, sent) {
  draw(current.messages);
  finishLast();
  $("log").append(turn);
  $("welcome").hidden = true;
  if (!sent || $("prompt").value) return;
  $("prompt").value = pictures.textOf(sent);
  if (!pictures.any()) pictures.put(pictures.urlsOf(sent));
}

/* ---- What is shown --------------------------------------------------------------------------------------------- */

function list() {
  conversations.list(current, open, (deleted) => {
    deleted.deleted = true;
    if (deleted.id === current.id) begin();
    else list();
  });
}

export function begin() {
  open(conversations.begin());
  $("prompt").focus();
}

export function open(conversation) {
  stop();
  delete conversation.deleted;
  current = conversation;
  draw(current.messages);
  finishLast();
  context(current.messages.findLast((message) => message.shown)?.shown.usage);
  list();
  document.querySelector("main").scrollTop = 1e9;
  if ($("sidebar").matches(":popover-open")) $("sidebar").hidePopover();
}

/* Shows the conversations that this browser keeps. */
export function start() {
  conversations.load();
  list();
  addEventListener("storage", () => (conversations.load(), list())); // another tab wrote
}

function draw(messages) {
  $("welcome").hidden = messages.length > 0;
  $("log").replaceChildren(...messages.map(turn));
}

function turn(message, at) {
  const node = element("div", `turn ${{ user: "asked", tool: "result" }[message.role] ?? "reply"}`);
  if (message.role === "assistant") {
    Reply.of(message, node);
    node.append(tools(copier(() => message.content, "Copy this reply")));
  } else if (message.role === "tool") {
    node.append(element("span", "small", "Result of the call"), element("pre", "", message.content));
  } else {
    node.append(...pictures.urlsOf(message.content).map(pictures.shown));
    node.append(element("p", "", pictures.textOf(message.content)));
    const edit = button("Edit", "Edit this message", () => editing(node, message, at));
    node.append(tools(copier(() => pictures.textOf(message.content), "Copy this message"), edit));
  }
  return node;
}

function tools(...buttons) {
  const bar = element("div", "tools small");
  bar.append(...buttons);
  return bar;
}

/* The last reply can be made anew, and its calls answered; if most of it came without drafts, it says so. */
function finishLast(request) {
  const at = current.messages.length - 1;
  const message = current.messages[at];
  if (message?.role !== "assistant") return;
  const node = $("log").children[at];
  node.querySelector(":scope > .tools")?.remove();
  const again = button("Regenerate", "Make this reply anew", () => answer(current.messages.slice(0, at)));
  node.append(tools(copier(() => message.content, "Copy this reply"), again));
  if (request && node.reply.rested) node.append(rested(request, at));
  if (message.tool_calls) node.append(results(message.tool_calls));
}

/* Why a reply came without drafts, or most of it, and a way to get them. */
function rested(request, at) {
  const told = element("p", "notice small");
  if (request.speculative === false) told.append("Drafts are off. ");
  else if (drafter() === "none") {
    told.append("This server has no drafter; start it with --draft ngram, for example.");
    return told;
  } else if (request.fixed_drafts) told.append("The drafter had nothing to propose for most of this reply.");
  else told.append("Drafts rest: at this load the server finds plain decoding faster. ");
  if (!request.fixed_drafts) {
    const ask = button("Ask for drafts", "", () => {
      $("drafts").value = "all";
      $("drafts").dispatchEvent(new Event("input", { bubbles: true }));
      answer(current.messages.slice(0, at));
    });
    told.append(ask);
  }
  return told;
}

function editing(node, message, at) {
  if (busy()) return;
  const field = element("textarea");
  field.value = pictures.textOf(message.content);
  const urls = pictures.urlsOf(message.content);
  field.setAttribute("aria-label", "The message, to be changed; what follows it goes");
  const back = () => node.replaceWith(turn(message, at));
  const sent = () => (field.value.trim() || urls.length) && send(field.value.trim(), urls, at);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sent();
  });
  node.classList.add("editing");
  node.replaceChildren(field, tools(button("Cancel", "", back), button("Send", "", sent)));
  field.focus();
}

/* Opens the last message of the user for changes. */
export function editLast() {
  const at = current.messages.findLastIndex((message) => message.role === "user");
  if (at >= 0 && $("log").children[at]) editing($("log").children[at], current.messages[at], at);
}

/* A form for the results of a reply's calls. */
function results(calls) {
  const form = element("form", "results");
  const fields = calls.map((call) => {
    const label = element("label", "field");
    const field = element("textarea");
    field.rows = 2;
    label.append(element("span", "small", `Result of ${call.function.name}`), field);
    form.append(label);
    return field;
  });
  const send = element("button", "", fields.length === 1 ? "Send the result" : "Send the results");
  form.append(send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const told = calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: fields[i].value }));
    answer([...current.messages, ...told]);
  });
  return form;
}

export function redraw() {
  for (const node of document.querySelectorAll(".reply")) node.reply?.redraw();
}
