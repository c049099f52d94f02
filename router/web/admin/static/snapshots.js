// The summary of snapshots: totals and limit, a histogram of lengths, the most used ones.

import { bytes, h, percent, short, tableOf, whole } from "./show.js";

export function showSnapshots({ note, sizes, top }, store, survey) {
  const limit = store.max_bytes > 0 ? ` of ${bytes(store.max_bytes)}` : "";
  note.textContent =
    `${whole(store.count)} snapshots, ${bytes(store.size_bytes)}${limit}, ` +
    `${short(store.tokens)} tokens, ${whole(store.evicted)} evicted${ofBlobs(store.blobs)}`;
  const most = Math.max(1, ...survey.sizes.map(([, n]) => n));
  const lengths = tableOf(
    ["Tokens", "Snapshots", "Size"],
    survey.sizes.map(([tokens, n, size]) => {
      const share = h("span", { class: "share", "aria-hidden": "true" });
      share.style.setProperty("--part", n / most);
      return [`≤ ${whole(tokens)}`, h("span", { class: "count" }, share, whole(n)), bytes(size)];
    }),
  );
  sizes.replaceChildren(...lengths);
  const rows = tableOf(
    ["Snapshot", "Tokens", "Size", "Uses", "In use"],
    survey.top.map((row) => [
      h("code", {}, row.id.slice(0, 8)),
      whole(row.tokens),
      bytes(row.size_bytes),
      whole(row.uses),
      row.in_use ? whole(row.in_use) : "",
    ]),
  );
  top.replaceChildren(...rows);
}

function ofBlobs(blobs) {
  if (!blobs) return "";
  const trouble = blobs.damaged ? `, ${whole(blobs.damaged)} damaged` : "";
  return (
    `; blobs: ${bytes(blobs.size_bytes)} for ${bytes(blobs.sum_bytes)} of files, ` +
    `${whole(blobs.unwritten)} not split yet; written in 24 hours: ${bytes(blobs.today_bytes)}, ` +
    `new tokens: ${bytes(blobs.new_today_bytes)}${trouble}`
  );
}

export const fullness = (store) =>
  store.max_bytes > 0 ? `${percent(store.size_bytes, store.max_bytes)} of ${bytes(store.max_bytes)}` : "no limit";
