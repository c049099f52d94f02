// Backends with their slots: cells, words for screen readers, and a table with the same data.

import { h, percent, setText, short, tableOf, whole } from "./show.js";

// Steps that do not fit into a cell; the tooltip has the whole words.
const NARROW = { "prefill queue": "queued", "placement gate": "gate", "check slot": "check", abandoned: "left" };
const PHASES = ["idle", "preparing", "running", "abandoned", "lost"];
const SOURCES = ["resident", "snapshot", "copy", "cold"];
const MOVED = new Set(["snapshot", "copy"]);
const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const MOVES = { save: "out", restore: "in", cut: "in" };

export class Backends {
  constructor(root, legend, table) {
    this.root = root;
    this.table = table;
    this.backends = new Map(); // backend name to its elements
    legend.append(
      ...PHASES.map((phase) => h("li", { "data-phase": phase }, phase)),
      ...SOURCES.map((source) => h("li", { class: "source", "data-source": source }, source)),
    );
    table.addEventListener("toggle", () => this.showTable());
  }

  show(picture) {
    this.picture = picture;
    const slots = new Map([...picture.backends.keys()].map((name) => [name, []]));
    for (const slot of picture.slots.values()) slots.get(slot.backend)?.push(slot);
    for (const name of this.backends.keys()) {
      if (!slots.has(name)) this.take(name);
    }
    for (const [name, row] of picture.backends) {
      if (!this.backends.has(name)) this.add(name);
      this.showBackend(this.backends.get(name), row, slots.get(name));
    }
    this.showTable();
  }

  // Most restores and copies end between two updates: flash the cell when the request is over.
  flash(decisions) {
    if (CALM.matches) return;
    for (const { backend, slot, source } of decisions) {
      if (!MOVED.has(source)) continue;
      const ring = { boxShadow: `0 0 0 2px var(--${source})` };
      this.backends.get(backend)?.cells[slot]?.root.animate([ring, {}], 1200);
    }
  }

  add(name) {
    const made = {
      name: h("h3", {}, name),
      about: h("p"),
      size: h("p", { title: "Slots × context of each in tokens; prefill rate" }),
      problem: h("p", { class: "bad" }),
      cells: [],
      list: h("ul", { class: "slots", "aria-label": `Slots of ${name}` }),
    };
    made.root = h("div", { class: "backend" });
    made.root.append(h("div", {}, made.name, made.about, made.size, made.problem), made.list);
    this.backends.set(name, made);
    this.root.append(made.root);
  }

  take(name) {
    this.backends.get(name).root.remove();
    this.backends.delete(name);
  }

  showBackend(made, row, slots) {
    const kind = row.up ? `${row.models[0] ?? "?"}, ${row.memory_kind.replace("_", " ")}` : "";
    setText(made.about, [kind, row.state].filter((part) => part && part !== "up").join(", "));
    const size = `${slots.length} × ${whole(row.n_ctx)}`;
    setText(made.size, row.up ? `${size}, ${short(Math.round(row.rates.prefill_tokens_per_s))} tok/s` : "");
    setText(made.problem, row.problem ?? "");
    while (made.cells.length > slots.length) made.cells.pop().root.remove();
    slots.sort((a, b) => a.index - b.index);
    slots.forEach((slot, i) => {
      if (i === made.cells.length) {
        made.cells.push(newCell());
        made.list.append(made.cells[i].root);
      }
      if (made.cells[i].shown !== slot || made.cells[i].n_ctx !== row.n_ctx) {
        showCell(made.cells[i], slot, row.n_ctx);
      }
    });
  }

  showTable() {
    if (!this.table.open || !this.picture) return;
    const head = ["Slot", "Phase", "Step", "Tokens", "Of context", "Source", "Request"];
    const rows = [...this.picture.slots].map(([id, slot]) => {
      const n_ctx = this.picture.backends.get(slot.backend)?.n_ctx;
      return [
        id,
        slot.phase,
        slot.prefilled == null ? (slot.doing ?? "") : `${slot.doing} ${Math.round(slot.prefilled * 100)} %`,
        whole(slot.resident_tokens),
        percent(slot.resident_tokens, n_ctx),
        slot.source ?? "",
        slot.request ?? "",
      ];
    });
    const table = h("table", {}, ...tableOf(head, rows));
    this.table.querySelector(".wide").replaceChildren(table);
  }
}

function newCell() {
  const cell = {
    origin: h("u", { "aria-hidden": "true" }),
    index: h("small", { "aria-hidden": "true" }),
    tokens: h("b", { "aria-hidden": "true" }),
    step: h("i", { "aria-hidden": "true" }),
    words: h("span", { class: "hidden" }),
  };
  cell.root = h("li", { class: "slot" });
  cell.root.append(cell.origin, cell.tokens, cell.index, cell.step, cell.words);
  return cell;
}

function showCell(cell, slot, n_ctx) {
  cell.shown = slot;
  cell.n_ctx = n_ctx;
  const { root } = cell;
  const step = slot.phase === "idle" || slot.phase === "lost" ? "" : (slot.doing ?? "wait");
  const word = slot.phase === "abandoned" ? "abandoned" : step;
  root.dataset.phase = slot.phase;
  toggle(root, "source", slot.source);
  toggle(root, "moving", slot.phase === "preparing" ? MOVES[slot.doing] : undefined);
  root.style.setProperty("--held", n_ctx ? Math.min(slot.resident_tokens / n_ctx, 1) : 0);
  root.style.setProperty("--pending", n_ctx ? Math.min(slot.pending_tokens / n_ctx, 1) : 0);
  const held = short(Math.max(slot.resident_tokens, slot.phase === "running" ? slot.pending_tokens : 0));
  setText(cell.index, String(slot.index));
  setText(cell.tokens, slot.phase === "lost" ? "×" : held);
  setText(cell.step, slot.phase === "lost" ? "lost" : (NARROW[word] ?? word));
  const source = slot.copy_from ? `copy of ${slot.copy_from}` : slot.source;
  const of = n_ctx ? ` of ${whole(n_ctx)}` : "";
  const done = slot.prefilled == null ? "" : ` ${Math.round(slot.prefilled * 100)} %`;
  if (done) setText(cell.step, done.trim());
  const words =
    `slot ${slot.index}: ${slot.phase}${word && ![slot.phase, "wait"].includes(word) ? `, ${word}${done}` : ""}, ` +
    `${whole(slot.resident_tokens)}${of} tokens${source ? `, ${source}` : ""}`;
  setText(cell.words, words);
  root.title = words;
}

function toggle(element, name, value) {
  if (value) element.dataset[name] = value;
  else delete element.dataset[name];
}
