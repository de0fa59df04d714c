/* What the page shows of the server: its model, its load, and how full a conversation's context is. */

import { $, share } from "./page.js";
import { busy } from "./running.js";
import { ServerError, call } from "./server.js";

let timer = null;
let info = null;
let used = null; // tokens of the conversation that is open

/* The server's programs that are still being compiled. */
export const pending = () => info?.stats.programs_pending?.length ?? 0;
export const drafter = () => info?.draft;
/* Whether nobody's request ran or waited when the server was last asked, a few seconds ago. */
export const idle = () => info?.stats.num_running + info?.stats.num_waiting === 0;

/* Asks for the server's figures now, and again in a while for as long as somebody looks. */
export async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    info = await (await call("server_info")).json();
    const { stats, engine } = info;
    const pages = (stats.total_pages - stats.free_pages - stats.cached_pages) / stats.total_pages;
    gauge("running", stats.num_running, stats.num_running / engine.max_running_requests);
    gauge("queue", stats.num_waiting, stats.num_waiting / engine.max_running_requests);
    gauge("pages", `${Math.round(100 * pages)}%`, pages);
    const drafts = info.draft === "none" ? "no drafter" : `drafts: ${info.draft}`;
    $("served").textContent = `${info.served_model_name} · ${drafts}`;
    $("served").title = `mean accept length since the start: ${info.avg_spec_accept_length.toFixed(2)}`;
    showContext();
  } catch (error) {
    const told = error.status === 401 ? "needs an API key (Settings)" : "not reachable";
    $("served").textContent = error instanceof ServerError ? told : "";
    if (error.status === 401) return; // until there is a key to try
  }
  clearTimeout(timer);
  timer = setTimeout(poll, busy() ? 1500 : 5000);
}

/* Notes how many tokens a conversation has, by the usage of its last reply. */
export function context(usage) {
  used = usage?.total_tokens ?? null;
  showContext();
}

function showContext() {
  const most = info?.engine.context_length;
  $("context").hidden = !used || !most;
  if (!used || !most) return;
  const count = (number) => number.toLocaleString("en");
  $("context-shown").textContent = `${count(used)} of ${count(most)} tokens`;
  share($("context"), used / most);
  $("context").classList.toggle("full", used > 0.9 * most);
}

function gauge(name, value, part) {
  $(name).textContent = value;
  share($(name).nextElementSibling, part);
}
