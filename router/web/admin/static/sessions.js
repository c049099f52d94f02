// The conversations that clients name. The event stream does not contain them: they are asked for
// while they are shown.

import { h, tableOf, whole } from "./show.js";

const AGAIN_MS = 5000;
const HEAD = ["Latest", "Conversation", "Named by", "Tenant", "Requests", "Prompt", "Computed", "Generated"];

export function showSessions(details) {
  let timer = 0;
  const box = details.querySelector(".wide");
  const load = async () => {
    const answer = await fetch("sessions?limit=20").catch(() => null);
    const known = answer?.ok ? (await answer.json().catch(() => null))?.sessions : null;
    if (known?.length) box.replaceChildren(h("table", {}, ...tableOf(HEAD, known.map(row))));
    else box.replaceChildren(h("p", { class: "note" }, known ? "None yet." : "Not known here."));
    if (details.open) timer = setTimeout(load, AGAIN_MS);
  };
  details.addEventListener("toggle", () => {
    clearTimeout(timer);
    if (details.open) load();
  });
}

const row = (one) => [
  new Date(one.last).toLocaleTimeString("sv"),
  one.id,
  one.named_by,
  one.tenant ?? "",
  whole(one.requests),
  whole(one.prompt_tokens),
  whole(one.computed_tokens),
  whole(one.generated_tokens),
];
