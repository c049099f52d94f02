// One decision in full: plan, report, candidates, and the point of divergence from held content.
// The dialog fetches `requests/{id}` for what the event stream does not contain.

import { h, place, seconds, tableOf, whole } from "./show.js";

const FIELDS = [
  ["outcome", String],
  ["reason", String],
  ["prompt_tokens", whole],
  ["planned_tokens", whole],
  ["cached_tokens", whole],
  ["computed_tokens", whole],
  ["generated_tokens", whole],
  ["waited_s", seconds],
  ["prepared_s", seconds],
  ["prefill_queue_s", seconds],
  ["ttft_s", seconds],
  ["predicted_s", seconds],
  ["total_s", seconds],
];

export class Detail {
  constructor(dialog) {
    this.dialog = dialog;
    this.title = dialog.querySelector("h2");
    this.body = dialog.querySelector("div");
  }

  async show(decision) {
    this.asked = decision.id;
    this.title.textContent = `Request ${decision.id}`;
    this.body.replaceChildren(facts(decision));
    if (!this.dialog.open) this.dialog.showModal();
    const answer = await fetch(`requests/${encodeURIComponent(decision.id)}`).catch(() => null);
    const known = answer?.ok ? await answer.json().catch(() => null) : null;
    if (this.asked !== decision.id) return; // another decision was opened meanwhile
    if (known?.nearest) this.body.append(...nearest(known.nearest));
    if (known?.plan) this.body.append(...candidates(known.plan));
    if (!known) this.body.append(h("p", { class: "note" }, "No more details are kept."));
  }
}

function list(rows) {
  const pairs = rows.filter(Boolean);
  return h("dl", {}, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function facts(decision) {
  return list([
    ["time", new Date(decision.time).toLocaleString("sv")],
    ["slot", place(decision)],
    ["source", decision.source ?? "–"],
    ...FIELDS.map(([name, format]) => [
      name.replace(/_s$/, "").replaceAll("_", " "),
      format(decision[name]),
    ]),
    ...Object.entries(decision.missed ?? {}).map(([why, n]) => [`computed: ${why}`, whole(n)]),
  ]);
}

function nearest(found) {
  const { slot, snapshot } = found;
  const where = slot ? `slot ${slot.backend}/${slot.index}` : `snapshot ${snapshot}`;
  const shared = `${whole(found.common_tokens)} of its ${whole(found.held_tokens)} tokens`;
  return [
    h("h3", {}, "Nearest held content"),
    list([
      ["in", where],
      ["shared", shared],
      found.diverges && ["tokens before", pieces(found.before)],
      found.diverges && ["held after it", pieces(found.held)],
      found.diverges && ["prompt after it", pieces(found.prompt)],
    ]),
  ];
}

// The server sends text only if the operator allows it.
const pieces = ({ ids, text }) => h("code", {}, text ?? ids.join(" "));

function candidates({ chosen, losers }) {
  const rows = [chosen, ...losers].map((one, i) => [
    `${place(one)}${i ? "" : " (chosen)"}`,
    h("span", { class: "badge", "data-source": one.source }, one.source),
    whole(one.reused_tokens),
    seconds(one.total_s),
    Object.entries(one.breakdown_s)
      .map(([part, s]) => `${part.replaceAll("_", " ")} ${seconds(s)}`)
      .join(", "),
  ]);
  return [
    h("h3", {}, "Candidates"),
    h(
      "div",
      { class: "wide", role: "region", "aria-label": "Candidates", tabindex: "0" },
      h("table", {}, ...tableOf(["Slot", "Source", "Reuses", "Price", "Parts"], rows)),
    ),
  ];
}
