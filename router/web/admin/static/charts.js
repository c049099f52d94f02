// TTFT and reuse over the last minutes, from the stream of decisions. Memory is bounded: a bucket
// keeps up to TIMES values for its percentiles, and old buckets are deleted.

import { clock, h, percent, seconds, svg, whole } from "./show.js";

const BUCKET_S = 15;
const BUCKETS = 60;
const TIMES = 200;
const LEFT = 50;
const BOTTOM = 18;
const TOP = 8;
const PARTS = ["resident", "snapshot", "computed"];

export class Timeline {
  constructor() {
    this.buckets = new Map(); // number to {ttft, resident, snapshot, computed}
  }

  add({ time_s, ttft_s, source, prompt_tokens, computed_tokens }) {
    const number = Math.floor(time_s / BUCKET_S);
    let bucket = this.buckets.get(number);
    if (!bucket) {
      bucket = { ttft: [], resident: 0, snapshot: 0, computed: 0 };
      this.buckets.set(number, bucket);
      for (const old of this.buckets.keys()) {
        if (old < number - 2 * BUCKETS) this.buckets.delete(old);
      }
    }
    if (ttft_s !== null && bucket.ttft.length < TIMES) bucket.ttft.push(ttft_s);
    if (prompt_tokens !== null && computed_tokens !== null) {
      const kind = source === "snapshot" || source === "copy" ? "snapshot" : "resident";
      bucket[kind] += prompt_tokens - computed_tokens;
      bucket.computed += computed_tokens;
    }
  }

  // Return the buckets to show, oldest first, and their totals.
  window(now_s) {
    const last = Math.floor(now_s / BUCKET_S);
    const rows = [];
    const all = { ttft: [], resident: 0, snapshot: 0, computed: 0 };
    for (let number = last - BUCKETS + 1; number <= last; number++) {
      const bucket = this.buckets.get(number);
      rows.push({ start_s: number * BUCKET_S, ...(bucket ?? { ttft: [] }) });
      if (!bucket) continue;
      all.ttft.push(...bucket.ttft);
      for (const part of PARTS) all[part] += bucket[part];
    }
    return { rows, all };
  }
}

// Return p50 and p90 by nearest rank; null without values.
export function percentiles(values) {
  const ordered = Float64Array.from(values).sort();
  return [0.5, 0.9].map((p) => ordered[Math.max(Math.ceil(p * ordered.length) - 1, 0)] ?? null);
}

export const promptTokens = (all) => all.resident + all.snapshot + all.computed;

export function drawTtft(root, note, { rows, all }) {
  const points = rows.map(({ ttft }) => percentiles(ttft));
  const seen = points.flat().filter((value) => value !== null);
  // Logarithmic: the times of a restore and of a cold prompt differ by orders of magnitude.
  const low = Math.floor(Math.log10(Math.max(Math.min(...seen, 0.1), 0.001)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...seen, 1))), low + 1);
  const { picture, x, y, width } = frame(root, rows);
  const at = (value) => y((Math.log10(Math.max(value, 0.001)) - low) / (high - low));
  for (let power = low; power <= high; power++) {
    rule(picture, at(10 ** power), width, power < 0 ? `${10 ** (power + 3)} ms` : `${10 ** power} s`);
  }
  for (const [name, which] of [["p90", 1], ["p50", 0]]) {
    const runs = [];
    points.forEach((point, i) => {
      if (point[which] === null) return;
      const before = i && points[i - 1][which] !== null;
      if (!before) runs.push([]);
      runs.at(-1).push([x(i + 0.5), at(point[which])]);
    });
    for (const run of runs) {
      if (run.length === 1) {
        picture.append(svg("circle", { class: name, cx: run[0][0], cy: run[0][1], r: 2.5 }));
      } else {
        picture.append(svg("path", { class: name, d: `M${run.map((p) => p.join(",")).join("L")}` }));
      }
    }
  }
  const [p50, p90] = percentiles(all.ttft);
  describe(picture, note, [
    [{ class: "key p50" }, `p50 ${seconds(p50)}`],
    [{ class: "key p90" }, `p90 ${seconds(p90)}`],
    [{}, `last ${(BUCKETS * BUCKET_S) / 60} minutes`],
  ]);
}

export function drawReuse(root, note, { rows, all }) {
  const { picture, x, y, width } = frame(root, rows);
  for (const share of [0, 0.5, 1]) rule(picture, y(share), width, `${100 * share} %`);
  rows.forEach((row, i) => {
    const total = row.computed === undefined ? 0 : promptTokens(row);
    let below = 0;
    for (const part of PARTS) {
      if (!total || !row[part]) continue;
      const share = row[part] / total;
      picture.append(
        svg("rect", {
          "data-source": part,
          x: x(i) + 0.5,
          width: Math.max(x(i + 1) - x(i) - 1, 1),
          y: y(below + share),
          height: y(below) - y(below + share),
        }),
      );
      below += share;
    }
  });
  const total = promptTokens(all);
  describe(picture, note, [
    ...PARTS.map((part) => [
      { class: "key", "data-source": part },
      `${part} ${percent(all[part], total)}`,
    ]),
    [{}, `of ${whole(total)}`],
  ]);
}

function frame(root, rows) {
  const [width, height] = [root.clientWidth || 500, root.clientHeight || 170];
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const x = (i) => LEFT + ((width - LEFT) * i) / rows.length;
  const y = (share) => TOP + (height - TOP - BOTTOM) * (1 - share);
  for (const [i, anchor] of [[0, "start"], [rows.length / 2, "middle"], [rows.length - 1, "end"]]) {
    const when = clock(new Date(rows[i].start_s * 1000)).slice(0, 5);
    const at = i === rows.length - 1 ? width - 1 : x(i);
    picture.append(svg("text", { x: at, y: height - 3, "text-anchor": anchor }, when));
  }
  root.replaceChildren(picture);
  return { picture, x, y, width };
}

function rule(picture, at, width, label) {
  picture.append(svg("line", { class: "grid", x1: LEFT, x2: width, y1: at, y2: at }));
  picture.append(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, label));
}

// Describe the chart in words, under the title and as the label of the picture.
function describe(picture, note, parts) {
  note.replaceChildren(...parts.flatMap(([attributes, text]) => [h("span", attributes, text), " "]));
  picture.setAttribute("aria-label", parts.map(([, text]) => text).join(", "));
}
