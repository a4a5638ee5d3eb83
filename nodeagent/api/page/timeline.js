// A job's generations: a strip to scale, and the same as a table: why each was formed, what it cost, what ended it.

import { at, badge, clock, el, plural, row, since, small, span } from "./draw.js";

const FAULTS = new Set([
  "worker_failed", "hang", "pod_failed", "node_lost", "collective", "fenced", "port_taken", "crowded",
  "runtime_failed", "join_failed", "hardware",
]);
const ENDED = new Set(["succeeded", "failed", "stopped"]);
const SHOWN = 4;
export const tones = {
  running: "good", succeeded: "good", failed: "bad", holding: "warn", forming: "plan", queued: "quiet",
  pausing: "plan", paused: "quiet", stopped: "quiet",
};

export function story(job) {
  const ran = job.generations.filter((g) => g.active !== null);
  const first = job.generations.length === 1 && !job.generations[0].ended_by && ran.length === 1;
  return el("article", { class: "story" },
    el("header", {}, el("h3", {}, job.name), badge(job.phase, tones[job.phase]), el("p", {}, ...cost(job))),
    ...(ran.length ? strip(job, ran) : []),
    first ? el("p", { class: "alone" }, `generation ${ran[0].number}: ${ran[0].cause}`)
      : job.generations.length ? table(job) : el("p", { class: "alone" }, "It has not started yet."));
}

/** What all of it cost, in a sentence. */
function cost(job) {
  if (job.started === null) return [""];
  const faults = job.generations.filter((g) => FAULTS.has(g.ended_by?.kind)).length;
  const parts = [plural(job.restarts, "restart"), faults && !job.earlier ? plural(faults, "fault") : ""];
  const least = job.all_known ? "" : "at least ";
  if (job.restarts && (job.all_known || job.downtime)) parts.push(`downtime ${least}${span(job.downtime)}`);
  if (job.all_known && job.restarts) {
    const whole = Math.max(1, (job.ended ?? clock()) - job.started);
    parts.push(`trained ${(100 * Math.max(0, 1 - job.downtime / whole)).toFixed(2)} % of the time`);
  }
  return [parts.filter(Boolean).join(" · ")];
}

function strip(job, ran) {
  const over = ENDED.has(job.phase);
  const end = over ? job.ended : clock();
  const begin = ran[0].active;
  const share = (time) => 100 * Math.min(1, Math.max(0, (time - begin) / Math.max(0.001, end - begin)));
  const box = el("div", { class: "strip", "aria-hidden": "true" });
  ran.forEach((g, index) => {
    const next = ran[index + 1];
    const stop = next ? next.active - (next.downtime ?? 0) : g.state === "ended" && g.ended_by ? g.ended_by.at : end;
    const part = el("div", { class: "trained", title: `generation ${g.number}` }, share(stop) - share(g.active) > 3 ? `${g.number}` : "");
    part.style.left = `${share(g.active)}%`;
    part.style.width = `${share(stop) - share(g.active)}%`;
    box.append(part);
    if (index === 0) return;
    const mark = el("div", { class: "mark", "data-tone": tone(job, g), title: g.cause });
    mark.style.left = `${share(g.active - (g.downtime ?? 0))}%`;
    box.append(mark);
  });
  return [box, el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, at(begin)), el("span", {}, over ? at(end) : "now"))];
}

/** Whether a fault or a plan led to this generation: what ended the one before says so. */
function tone(job, generation) {
  return FAULTS.has(kind(job, generation)) ? "bad" : "plan";
}

function kind(job, generation) {
  if (generation.number === job.generation && job.cause) return job.cause.kind;
  return before(job, generation)?.kind ?? "start";
}

const before = (job, generation) => job.generations.filter((g) => g.number < generation.number && g.ended_by).at(-1)?.ended_by;

function table(job) {
  const rows = [...job.generations].reverse();
  const made = el("table", { role: "table", "aria-label": `Generations of ${job.name}` }, head(), body(job, rows.slice(0, SHOWN)));
  const rest = rows.slice(SHOWN);
  if (!rest.length) return made;
  const earlier = job.earlier ? `, of ${rest.length + job.earlier}` : "";
  const more = el("details", { "data-name": "earlier" }, el("summary", {}, `${plural(rest.length, "earlier generation")}${earlier}`),
    el("table", { role: "table", "aria-label": `Earlier generations of ${job.name}` }, head(), body(job, rest)));
  return el("div", {}, made, more);
}

function head() {
  const names = ["Generation", "Started", "Formed because", "Downtime", "Ended by"];
  return el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...names.map((name) => el("th", { role: "columnheader", scope: "col" }, name))));
}

function body(job, rows) {
  return el("tbody", { role: "rowgroup" }, ...rows.map((g) => {
    const why = kind(job, g);
    const ended = g.ended_by;
    return row([
      ["Generation", [`${g.number}`, g.state === "ended" ? null : small(g.state)]],
      ["Started", g.active === null ? "" : [at(g.active), g.state === "active" ? el("small", {}, since(g.active), " ago") : null], "few"],
      ["Formed because", [why === "start" ? null : badge(why.replaceAll("_", " "), tone(job, g)), why === "start" ? null : " ", g.cause || before(job, g)?.text, small(g.recovery)], "wide"],
      ["Downtime", g.downtime === null ? "" : span(g.downtime), "few"],
      ["Ended by", ended ? [ended.text || ended.kind.replaceAll("_", " "), small(ended.judged_when || (ended.counts ? "spent one restart of the budget" : ""))] : g.ended_because, "wide"],
    ]);
  }));
}
