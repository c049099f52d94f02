// Formats of numbers, and builders of elements. Text is always inserted as text: content of
// requests is never parsed as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.map((child) => child ?? ""));
  return element;
}

export function svg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const grouped = new Intl.NumberFormat("en");

export const whole = (n) => (n === null || n === undefined ? "–" : grouped.format(n));

export function short(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1000) return String(n);
  if (n < 9950) return `${(n / 1000).toFixed(1)}k`;
  if (n < 999_500) return `${Math.round(n / 1000)}k`;
  return `${(n / 1e6).toFixed(1)}M`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${unit && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 99.95) return `${s.toFixed(s < 9.995 ? 2 : 1)} s`;
  return `${Math.round(s)} s`;
}

export const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

export const place = ({ backend, slot }) => (backend ? `${backend}/${slot}` : "–");

// Return the head and body of a table: column names, then rows of texts or elements.
export function tableOf(head, rows) {
  return [
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell) => h("td", {}, cell))))),
  ];
}

export const clock = (date) => date.toLocaleTimeString("en-GB");
