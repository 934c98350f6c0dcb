// Elements, and files that a person saves.

export const by = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const button = (label, onclick, more = {}) => element("button", { type: "button", onclick, ...more }, label);

export const cell = (value, more = {}) => element("td", more, value);

export function save(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = element("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** A button's work: copy the text, and say so. */
export const copied =
  (text) =>
  async ({ target }) => {
    const done = navigator.clipboard?.writeText(text) ?? Promise.reject(); // there is none on a host without https
    target.textContent = await done.then(
      () => "Copied",
      () => "The browser does not allow it",
    );
  };
