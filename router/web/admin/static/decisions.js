// The table of decisions: one row for each finished request.

import { clock, h, place, seconds, whole } from "./show.js";

const SHOWN = 100;

export class Decisions {
  constructor(table, detail) {
    this.body = table.querySelector("tbody");
    this.detail = detail;
    this.waiting = [];
  }

  reset(decisions) {
    this.waiting = [];
    this.body.replaceChildren();
    this.add(decisions);
    this.fresh = true;
  }

  // Add decisions, newest first.
  add(decisions) {
    this.waiting = [...decisions, ...this.waiting].slice(0, SHOWN);
    this.fresh = false;
  }

  show() {
    const rows = this.waiting.map((decision) => this.row(decision));
    this.waiting = [];
    // Keep the row with the keyboard focus.
    const focused = document.activeElement?.closest("tr");
    this.body.prepend(...rows);
    while (this.body.rows.length > SHOWN && this.body.lastElementChild !== focused) {
      this.body.lastElementChild.remove();
    }
  }

  row(decision) {
    const { id, source, outcome, prompt_tokens, computed_tokens } = decision;
    const reused = (prompt_tokens ?? 0) - (computed_tokens ?? 0);
    const share = h("span", { class: "share", "aria-hidden": "true" });
    share.style.setProperty("--part", prompt_tokens ? reused / prompt_tokens : 0);
    const button = h("button", { type: "button", class: "id", title: id }, id.slice(0, 8));
    button.setAttribute("aria-label", `Request ${id.slice(0, 8)}, details`);
    button.addEventListener("click", () => this.detail.show(decision));
    const known = prompt_tokens !== null && computed_tokens !== null;
    const tokens = known ? `${whole(reused)} / ${whole(prompt_tokens)}` : "–";
    const cell = (name, ...children) => h("td", { role: "cell", class: name }, ...children);
    return h(
      "tr",
      { role: "row", class: this.fresh ? null : "new", "data-source": source },
      cell("time", clock(new Date(decision.time))),
      cell("request", button),
      cell("slot-id", place(decision)),
      cell("source", h("span", { class: "badge" }, source ?? "–")),
      cell("reuse", share, tokens),
      cell("ttft number", seconds(decision.ttft_s)),
      cell("predicted number", seconds(decision.predicted_s)),
      cell(
        "reason",
        outcome === "ok" ? "" : h("strong", { class: "bad" }, `${outcome.replaceAll("_", " ")} `),
        decision.reason,
        missed(decision),
      ),
    );
  }
}


// Return the reasons for computed prompt tokens, the largest count first.
function missed({ missed: parts }) {
  const sorted = Object.entries(parts ?? {}).sort(([, a], [, b]) => b - a);
  if (!sorted.length) return null;
  const words = sorted.map(([why, tokens]) => `${whole(tokens)} ${why.replaceAll("_", " ")}`);
  return h("span", { class: "missed" }, `computed: ${words.join(", ")}`);
}
