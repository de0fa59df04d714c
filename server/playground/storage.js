/* The browser's storage, for this page's address alone: servers behind one proxy keep apart. */

const PREFIX = `jaxspec ${location.pathname} `;

export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null; // storage is off, or somebody else wrote there
  }
}

/* Whether there was room for it. */
export function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // storage is off: nothing was kept
  }
}

export function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}
