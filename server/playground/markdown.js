/* Markdown as the model writes it, rendered.

   Invariant: the result has the elements and attributes listed here and no others, links lead to the web or to mail,
   and nothing is loaded. Raw HTML in the text is shown as text.

   vendor/ has marked (npm's lib/marked.esm.js) and DOMPurify (dist/purify.min.js) as published, but for the line that
   names a source map. Their first lines say the versions. */

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js"; // sets globalThis.DOMPurify
import { copier, element } from "./page.js";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."p br hr h1 h2 h3 h4 h5 h6 strong em del blockquote ul ol li pre code a".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/* Returns a fragment of the document. An answer that is a JSON object, or a list of them, is shown as code. */
export function rendered(answer) {
  const text = /^\s*(\[\s*)?\{/.test(answer) ? `~~~~~~json\n${answer}\n~~~~~~` : answer;
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.title = link.getAttribute("href"); // where it leads, whatever its text says
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, "scroll");
  for (const block of fragment.querySelectorAll("pre")) {
    const language = block.firstElementChild?.className.replace(/^language-/, "") ?? "";
    const bar = element("div", "bar small");
    bar.append(element("span", "", language), copier(() => block.textContent, "Copy this code"));
    wrap(block, "code").prepend(bar);
    block.tabIndex = 0; // it may scroll
  }
  return fragment;
}

function wrap(node, className) {
  const around = element("div", className);
  node.replaceWith(around);
  around.append(node);
  return around;
}
