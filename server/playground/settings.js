/* The settings: fields of the page that become fields of a request. All but the API key stay in the browser. */

import { $ } from "./page.js";
import { key, sentence } from "./server.js";
import { idle } from "./status.js";
import { read, write } from "./storage.js";

const KEPT = [
  ...["system", "drafts", "temperature", "top-p", "top-k", "max-tokens", "seed", "stop", "schema", "tools"],
  ...["tool-choice", "thinking", "effort", "probabilities", "coloured", "as-tokens"],
];
const TOP = 5; // probabilities on hover

const number = (id) => ($(id).value === "" ? null : Number($(id).value));

/* A field's JSON, or null where it is empty. **Throws** an error whose message names the field. */
function json(id, name, kind) {
  const text = $(id).value.trim();
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(id, `${name} in the settings must be JSON. The browser says: ${sentence(error.message)}`);
  }
  if (!kind(value)) throw new FieldError(id, `${name} in the settings must be ${kind.words}.`);
  return value;
}
const list = Object.assign((value) => Array.isArray(value), { words: "a JSON list, as OpenAI's API takes them" });
const object = Object.assign((value) => value?.constructor === Object, { words: "a JSON object" });

export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/* How a request asks for drafts: all of them, as many as the server finds fastest, or none. All of them hold for its
   whole batch, so by default only a request to an idle server asks for them. */
const drafts = (chosen) => DRAFTS[chosen === "idle" ? (idle() ? "all" : "server") : chosen];
export const DRAFTS = { all: { fixed_drafts: true }, server: {}, none: { speculative: false } };

/* A request's body. Fields that say nothing aren't sent, so the server's defaults hold. */
export function body(messages, more = {}) {
  const system = $("system").value.trim();
  const tools = json("tools", "Tools", list);
  const schema = json("schema", "The schema", object);
  const stop = $("stop").value.split("\n").filter(Boolean);
  const thinking = { on: true, off: false }[$("thinking").value];
  const wanted = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number($("temperature").value),
    top_p: number("top-p"),
    top_k: number("top-k"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stop: stop.length ? stop : null,
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
    tools,
    tool_choice: tools && $("tool-choice").value,
    chat_template_kwargs: thinking === undefined ? null : { enable_thinking: thinking },
    reasoning_effort: $("effort").value || null,
    stream: true,
    stream_options: { include_usage: true },
    token_sources: true,
    ...($("probabilities").checked && { logprobs: true, top_logprobs: TOP }),
    ...drafts($("drafts").value),
    ...more,
  };
  return Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== null));
}

const show = () => {
  $("temperature-shown").value = $("temperature").value;
  document.body.classList.toggle("uncoloured", !$("coloured").checked);
  document.body.classList.toggle("as-tokens", $("as-tokens").checked);
};

/* Shows the settings as they were left. `changed` is called with the id of a field that changes. */
export function open(changed) {
  const kept = read("settings") ?? {};
  const state = (field) => (field.type === "checkbox" ? "checked" : "value");
  for (const id of KEPT) if (id in kept) $(id)[state($(id))] = kept[id];
  show();
  document.addEventListener("input", ({ target }) => {
    if (target.id === "key") key.value = target.value;
    if (!KEPT.includes(target.id)) return;
    show();
    write("settings", Object.fromEntries(KEPT.map((id) => [id, $(id)[state($(id))]])));
  });
  document.addEventListener("change", ({ target }) => changed(target.id));
}

/* Opens the settings at a field. */
export function goTo(field) {
  $("settings").showPopover();
  $(field).closest("details")?.setAttribute("open", "");
  $(field).focus();
}
