// The live page: one event stream updates the picture, from which everything is drawn.

import { Timeline, drawReuse, drawTtft, percentiles, promptTokens } from "./charts.js";
import { Decisions } from "./decisions.js";
import { Detail } from "./detail.js";
import { Backends } from "./backends.js";
import { apply, pictureOf } from "./picture.js";
import { h, percent, seconds, setText, short, whole } from "./show.js";
import { showLogs } from "./logs.js";
import { fullness, showSnapshots } from "./snapshots.js";

const REDRAW_MS = 5000; // charts move with time, also without events
const CHARTS_MS = 900; // every other event
const AGAIN_MS = 10_000; // after a refusal, when a browser does not reconnect by itself

const find = (id) => document.getElementById(id);
const backends = new Backends(find("backends"), find("legend"), find("slots-table"));
const decisions = new Decisions(find("decisions"), new Detail(find("detail")));
const snapshots = { note: find("snapshots-note"), sizes: find("sizes"), top: find("top") };

let picture = null;
let timeline = new Timeline();
let clockOffset_ms = 0; // the server's clock minus the browser's
let paused = false;
let due = false;
let chartsShown = 0;
let shownSurvey = null;
let shownStore = null;
let up = new Map();

const now_s = () => (Date.now() + clockOffset_ms) / 1000;

function connect() {
  const stream = new EventSource("events");
  stream.addEventListener("picture", (event) => {
    const message = JSON.parse(event.data);
    picture = pictureOf(message);
    clockOffset_ms = message.time * 1000 - Date.now();
    timeline = new Timeline();
    for (const [time, ttft_s, source, prompt_tokens, computed_tokens] of message.history) {
      note({ time, ttft_s, source, prompt_tokens, computed_tokens });
    }
    message.decisions.forEach(note);
    decisions.reset(message.decisions);
    connection("live", "Live");
    render();
  });
  stream.addEventListener("change", (event) => {
    const change = JSON.parse(event.data);
    apply(picture, change);
    const over = change.decisions ?? [];
    over.forEach(note);
    decisions.add(over);
    if (!paused) backends.flash(over);
    render();
  });
  stream.addEventListener("error", () => {
    connection("lost", "Not connected, trying again");
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  });
}

const note = (decision) =>
  timeline.add({ ...decision, time_s: new Date(decision.time).getTime() / 1000 });

function connection(state, text) {
  find("connection").dataset.state = state;
  setText(find("connection"), text);
}

// Draw at most once per frame, and not while the page is hidden.
function render() {
  if (due || paused || !picture) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    show();
  });
}

function show() {
  const { policy, stopping } = picture.host.get("router");
  setText(find("policy"), stopping ? `${policy}, stopping` : policy);
  showServers(picture.host.get("servers").items);
  showHosts(picture.host.get("hosts").items);
  backends.show(picture);
  decisions.show();
  const store = picture.host.get("store");
  const survey = picture.host.get("snapshots");
  if (survey !== shownSurvey || store !== shownStore) {
    showSnapshots(snapshots, store, survey);
    [shownSurvey, shownStore] = [survey, store];
  }
  if (Date.now() - chartsShown >= CHARTS_MS) charts();
  announce();
}

// Servers on demand: a stopped one is no backend, and would not be seen else.
function showServers(items) {
  find("servers").hidden = find("logs").hidden = !items.length;
  const said = items.map(
    ({ name, phase, waiting }) => `${name} ${phase}${waiting ? ` (${whole(waiting)} waiting)` : ""}`,
  );
  setText(find("servers"), `Servers on demand: ${said.join("; ")}`);
}

// This host and its peers, with the requests for each slot of a peer.
function showHosts(items) {
  find("hosts").hidden = !items.length;
  const said = items.map(({ name, up, here, load }) =>
    here ? `${name} (this one)` : `${name} ${up ? `load ${load}` : "not used"}`,
  );
  setText(find("hosts"), `Hosts: ${said.join("; ")}`);
}

function charts() {
  chartsShown = Date.now();
  const seen = timeline.window(now_s());
  drawTtft(find("ttft"), find("ttft-note"), seen);
  drawReuse(find("reuse"), find("reuse-note"), seen);
  figures(seen.all);
}

function figures(all) {
  const slots = [...picture.slots.values()];
  const queue = picture.host.get("queue");
  const store = picture.host.get("store");
  const total = promptTokens(all);
  const [p50, p90] = percentiles(all.ttft);
  const waiting = queue.depth + queue.waiting_for_backend;
  const busy = slots.filter(({ phase }) => phase !== "idle" && phase !== "lost").length;
  const nUp = [...picture.backends.values()].filter((row) => row.up).length;
  const shown = [
    ["Reused", percent(total - all.computed, total), `of ${short(total)} prompt tokens`],
    ["TTFT p50", seconds(p50), `p90 ${seconds(p90)}`],
    ["Busy slots", `${busy} / ${slots.length}`, `${nUp} of ${picture.backends.size} backends up`],
    ["Queue", whole(waiting), waiting ? `oldest ${seconds(queue.oldest_s)}` : "none waiting"],
    ["Snapshots", whole(store.count), fullness(store)],
  ];
  const root = find("figures");
  if (!root.children.length) {
    root.append(
      ...shown.map(([name]) =>
        h("div", {}, h("dt", {}, name), h("dd", { class: "value" }), h("dd", { class: "more" })),
      ),
    );
  }
  shown.forEach(([, value, more], i) => {
    setText(root.children[i].children[1], value);
    setText(root.children[i].children[2], more);
  });
}

// Announce to screen readers only changes that justify an interruption.
function announce() {
  const before = up;
  up = new Map([...picture.backends].map(([name, row]) => [name, row.up]));
  const said = [...up]
    .filter(([name, is]) => before.has(name) && before.get(name) !== is)
    .map(([name, is]) => `Backend ${name} is ${is ? "up" : "down"}.`);
  if (said.length) setText(find("news"), said.join(" "));
}

find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").setAttribute("aria-pressed", String(paused));
  render();
});
new ResizeObserver(() => picture && !paused && charts()).observe(find("ttft"));
setInterval(render, REDRAW_MS);
showLogs(find("logs"), () => (picture?.host.get("servers").items ?? []).map(({ name }) => name));
connect();
