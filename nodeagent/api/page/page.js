// The status page: asks the agent every two seconds while somebody looks, and shows what it says. It changes nothing.

import { at, badge, clock, el, keep, plural, ranges, row, setClock, since, small, tick } from "./draw.js";
import { picture } from "./shares.js";
import { story, tones } from "./timeline.js";

const EVERY = 2000;
const PATIENCE = 5000;
const MANY_NODES = 40;
const ENDED = new Set(["succeeded", "failed", "stopped"]);
const NODE_TONES = { ready: "good", restarting: "plan", cordoned: "warn", draining: "warn", maintenance: "plan", leaving: "warn", mute: "warn", silent: "bad", lost: "bad", left: "quiet" };
const find = (id) => document.getElementById(id);

let token = sessionStorage.getItem("nodeagent-token") ?? "";
let answered = null; // when the agent answered last, by its clock
let failing = null;

// --- asking

class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the agent answered with HTTP ${status}`);
    this.status = status;
    this.next = error?.next ?? "";
  }
}

async function ask() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch("v1/status", { headers, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(PATIENCE) });
  const answer = await reply.json().catch(() => null);
  if (!reply.ok || answer === null) throw new Refused(reply.status, answer?.error);
  return answer;
}

async function look() {
  try {
    const status = await ask();
    setClock(status.now);
    answered = status.now;
    failing = null;
    find("door").hidden = true;
    show(status);
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  failing ??= clock();
  const refused = error instanceof Refused;
  const strange = refused && error.status === 401;
  const entry = find("door");
  if (strange && entry.hidden) {
    entry.hidden = false;
    find("token").focus();
  }
  const notices = [];
  if (strange && token) notices.push(["bad", "The agent does not know this token.", ""]);
  else if (refused && !strange) notices.push([error.status === 503 ? "warn" : "bad", capital(error.message), error.next]);
  else if (!refused) {
    const last = answered === null ? `This agent does not answer, since ${at(failing)}.` : `This agent has not answered since ${at(answered)}. What is below was so then.`;
    notices.push(["bad", last, "Asked again every 2 s. Is it running? See: systemctl status nodeagent, or look at the page of another node."]);
  }
  tell(notices);
  live(strange ? "quiet" : "bad", strange ? "waits for a token" : "no answer");
  find("shown").classList.add("old");
}

find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  sessionStorage.setItem("nodeagent-token", token);
  find("token").value = "";
  look();
});

// --- showing

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function live(tone, text) {
  find("live").dataset.tone = tone;
  find("live-text").textContent = text;
}

function tell(notices) {
  keep(find("notices"), notices.map((notice) => [notice[1], notice]), ([tone, text, next]) =>
    el("p", { class: "notice", "data-tone": tone }, text, small(next)));
}

function show(status) {
  find("cluster").textContent = status.cluster;
  document.title = `nodeagent ${status.cluster}`;
  find("asked").textContent = `as node ${status.node} sees it · version ${status.version}`;
  const away = status.store_away_since;
  const notices = [];
  if (away !== null) notices.push(["warn", `The store has not answered the agent of node ${status.node} since ${at(away)}. What is below was so then.`,
    `${capital(status.goes_on)}; through this agent nothing can be started or changed. See: nodeagentctl doctor`]);
  else if (status.store_waits) notices.push(["warn", `${capital(status.store_waits)}.`,
    "Running jobs go on; nothing can be started or changed. Start the agents of those nodes, if you can."]);
  tell(notices);
  live(away === null ? "good" : "warn", away === null ? `live, ${at(status.now)}` : "no answer from the store");
  const main = find("shown");
  main.hidden = false;
  main.classList.toggle("old", away !== null);
  showSummary(status);
  showJobs(status);
  showShares(status.shares);
  showNodes(status);
  tick();
}

function storeTile({ store_away_since: away, store_waits: waits }) {
  if (away !== null) return ["no answer", `since ${at(away)}`, "bad"];
  return waits ? ["waits", "it may have lost writes", "warn"] : ["answers", "changes can be made", "good"];
}

function showSummary(status) {
  const { totals } = status;
  const listed = (sums, but) => Object.entries(sums).filter(([word]) => word !== but).map(([word, n]) => `${n} ${word}`).join(", ");
  const { states, gpus, healthy, used, phases } = totals;
  const alive = Object.entries(phases).reduce((sum, [phase, n]) => (ENDED.has(phase) ? sum : sum + n), 0);
  const trouble = Object.keys(states).some((state) => NODE_TONES[state] === "bad");
  const tiles = [
    ["Nodes ready", `${states.ready ?? 0} of ${totals.nodes}`, listed(states, "ready") || "all of them", trouble ? "bad" : "good"],
    ["GPUs healthy", gpus ? `${healthy} of ${gpus}` : "none", gpus ? `${used} used` : "workers run on CPU slots", healthy < gpus ? "bad" : "good"],
    ["Live jobs", `${alive}`, listed(phases) || "none yet", phases.holding ? "warn" : "good"],
    ["Store", ...storeTile(status)],
  ];
  keep(find("summary"), tiles.map((tile) => [tile[0], tile]), ([name, value, more, tone]) =>
    el("div", { "data-tone": tone }, el("dt", {}, name), el("dd", {}, value), el("dd", {}, more)));
}

function showJobs({ jobs, more_jobs: more }) {
  find("no-jobs").hidden = jobs.length > 0;
  find("jobs").hidden = jobs.length === 0;
  find("timeline").hidden = jobs.length === 0;
  find("more-jobs").hidden = more === 0;
  find("more-jobs").textContent = `${plural(more, "more job")}: nodeagentctl get`;
  keep(find("jobs").tBodies[0], jobs.map((job) => [job.uid, job]), jobRow);
  const turn = (job) => (ENDED.has(job.phase) ? 0 : Math.floor(clock() / 10)); // the strip of a live one grows
  keep(find("stories"), jobs.map((job) => [job.uid, [job, turn(job)]]), ([job]) => story(job));
}

function jobRow(job) {
  const over = ENDED.has(job.phase);
  const roles = Object.entries(job.roles).map(([name, role]) => `${name} ${role.places}/${role.target}`);
  const about = [job.min === job.max ? "" : `may be ${job.min}-${job.max}`, job.chief ? `chief ${job.chief}` : ""];
  const { used, max } = job.budget;
  return row([
    ["Job", [job.name, small(job.owner)]],
    ["Phase", [badge(job.phase, tones[job.phase]), el("small", {}, ...(over && job.ended !== null ? [`at ${at(job.ended)}`] : ["for ", since(job.since)]))], "few"],
    ["Nodes", [`${job.world_nodes} of ${job.target + (job.borrowed ?? 0)}`, small([...about, ...roles].filter(Boolean).join(", "))], "few"],
    ["Workers", job.world_size ? [`${job.world_size}`, small(job.gpus ? plural(job.gpus, "GPU") : "")] : "", "few"],
    ["Generation", job.generation ? [`${job.generation}`, small(job.generation_state === "ended" ? "" : job.generation_state)] : "", "few"],
    ["Restarts", [`${job.restarts}`, small(`${used} of ${max} spent`), small(job.goodput === null ? "" : `goodput ${(100 * job.goodput).toFixed(1)} %`)], "few"],
    ["Checkpoint", job.checkpoint ? [`step ${job.checkpoint.step}`, small(`generation ${job.checkpoint.generation}`)] : "", "few"],
    ["Why", job.reason, "wide"],
  ], { class: over ? "over" : "" });
}

function showShares(shares) {
  find("use").hidden = shares === null;
  keep(find("picture"), shares === null ? [] : [["shares", shares]], picture);
}

function showNodes({ nodes, more_nodes: more }) {
  const plain = (n) => n.state === "ready" && !n.condition && n.gpus.every((g) => g.healthy);
  const many = nodes.length > MANY_NODES;
  const rest = many ? nodes.filter(plain) : [];
  const entries = (list) => list.map((node) => [node.name, node]);
  keep(find("nodes").tBodies[0], entries(many ? nodes.filter((n) => !plain(n)) : nodes), nodeRow);
  const well = find("well");
  well.hidden = !rest.length;
  well.querySelector("summary").textContent = `${plural(rest.length, "node")} ready, with nothing to say of them`;
  const table = well.querySelector("table");
  if (!table.tHead.childElementCount) table.tHead.append(find("nodes").tHead.rows[0].cloneNode(true));
  if (!well.hidden) keep(table.tBodies[0], well.open ? entries(rest) : [], nodeRow);
  find("more-nodes").hidden = more === 0;
  find("more-nodes").textContent = `${plural(more, "more node")}: nodeagentctl nodes`;
}

function nodeRow(node) {
  const healthy = node.gpus.filter((g) => g.healthy).length;
  const sick = node.gpus.filter((g) => !g.healthy && !node.condition.startsWith(`GPU ${g.index}:`)).map((g) => `GPU ${g.index}: ${g.why}`);
  const next = node.verdicts.find((v) => v.stage === "active" && v.severity !== "info")?.next ?? "";
  const reasons = [...new Set([node.reason, ...sick, node.condition, node.breaker && `breaker ${node.breaker}`].filter(Boolean))];
  return row([
    ["Node", node.name],
    ["State", badge(node.state, NODE_TONES[node.state]), "few"],
    ["GPUs", node.gpus.length ? [`${healthy} of ${node.gpus.length} healthy`, gpus(node.gpus)] : "", "few"],
    ["CPU slots", node.cpu_slots ? `${node.cpu_slots_used} of ${node.cpu_slots} used` : "", "few"],
    ["Work", node.pods.map((p) => el("div", {}, p.job, el("span", { class: "quiet" }, p.ranks.length ? ` ranks ${ranges(p.ranks)}` : " stopping", p.places.length ? `: ${p.places.join(", ")}` : ""))), "work"],
    ["Condition", reasons.length ? [...reasons.map((text) => el("div", {}, text)), small(next && `Next: ${next}`)] : "", "wide"],
  ], { class: node.state === "left" ? "over" : "" });
}

function gpus(list) {
  const word = (g) => (g.healthy ? (g.job === null ? "free" : `used by ${g.job}`) : `unfit: ${g.why}`);
  const spoken = list.map((g) => `GPU ${g.index} ${word(g)}`).join(", ");
  return el("div", { class: "cells", role: "img", "aria-label": spoken }, ...list.map((g) =>
    el("span", { class: `gpu ${g.healthy ? (g.job === null ? "" : "used") : "unfit"}`, title: `GPU ${g.index} ${g.name}: ${word(g)}` })));
}

// --- for as long as somebody looks

async function forever() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, EVERY));
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
find("well").addEventListener("toggle", look);
setInterval(tick, 1000);
forever();
