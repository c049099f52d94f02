// The logs of servers on demand, while they are shown: the end of each, then what is added.

import { h, setText } from "./show.js";

const AGAIN_MS = 2000;
const FIRST_BYTES = 8192;
const MOST_CHARACTERS = 100_000;
const POSITION = "x-kvferry-log-position";

// `names` returns the servers of the moment.
export function showLogs(details, names) {
  const box = details.querySelector(".wide");
  const shown = new Map();
  let timer = 0;

  const follow = async (name) => {
    if (!shown.has(name)) {
      const text = h("pre", { tabindex: "0" });
      box.append(h("h3", {}, name), text);
      shown.set(name, { text, after: null });
    }
    const log = shown.get(name);
    const from = log.after === null ? `bytes=${FIRST_BYTES}` : `after=${log.after}`;
    const answer = await fetch(`servers/${encodeURIComponent(name)}/log?${from}`).catch(() => null);
    if (!answer?.ok) {
      setText(log.text, "Shown only where admin.token_env and admin.protect_reads are set.");
      return;
    }
    const added = await answer.text();
    log.after = answer.headers.get(POSITION);
    if (!added) return;
    const atEnd = log.text.scrollTop + log.text.clientHeight >= log.text.scrollHeight - 4;
    setText(log.text, (log.text.textContent + added).slice(-MOST_CHARACTERS));
    if (atEnd) log.text.scrollTop = log.text.scrollHeight;
  };
  const load = async () => {
    await Promise.all(names().map(follow));
    if (details.open) timer = setTimeout(load, AGAIN_MS);
  };
  details.addEventListener("toggle", () => {
    clearTimeout(timer);
    if (details.open) load();
  });
}
