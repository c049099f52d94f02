// The state as the server last described it. A change holds whole rows; null removes a row.

const SECTIONS = ["host", "backends", "slots"];

export function pictureOf(message) {
  return Object.fromEntries(
    SECTIONS.map((section) => [section, new Map(Object.entries(message[section]))]),
  );
}

export function apply(picture, change) {
  for (const section of SECTIONS) {
    for (const [key, row] of Object.entries(change[section] ?? {})) {
      if (row === null) picture[section].delete(key);
      else picture[section].set(key, row);
    }
  }
}
