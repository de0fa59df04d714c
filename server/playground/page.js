/* Small helpers for the document. */

export const $ = (id) => document.getElementById(id);

/* Text reaches an element as text, never as markup. */
export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(text, label, pressed) {
  const made = element("button", "", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", pressed);
  return made;
}

/* A button that copies `text()` and says so. */
export function copier(text, label) {
  const made = button("Copy", label, async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed here"; // browsers give the clipboard to https and to this machine alone
    }
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

export function share(node, value) {
  node.style.setProperty("--share", Number.isFinite(value) ? Math.min(Math.max(value, 0), 1) : 0);
}

/* Says something to everybody, screen readers included, with an action to take it back or go on. */
export function tell(text, action, acted) {
  const said = element("span", "", text);
  $("told").replaceChildren(said, button(action, "", () => ($("told").replaceChildren(), acted())));
  setTimeout(() => said.parentNode?.replaceChildren(), 8000);
}
