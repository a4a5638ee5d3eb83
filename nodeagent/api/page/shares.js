// What queues used, day by day, as a share of what the cluster has.

import { el, small } from "./draw.js";

const WORDS = { gpu: "GPU hours", slot: "slot hours" };
const hours = (value) => value.toLocaleString("en-GB", { maximumFractionDigits: 1 });
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);

/** A column for each day, its parts by queue, and below it what the colours are. */
export function picture({ device, capacity, days, queues }) {
  const totals = days.map((_, index) => sum(queues.map((queue) => queue.hours[index])));
  const whole = Math.max(capacity, ...totals, 0.001);
  const labels = days.map((day, index) => [day, ...queues.filter((q) => q.hours[index] > 0).map((q) => `${q.name} ${hours(q.hours[index])}`)].join(", "));
  const columns = days.map((day, index) => {
    const parts = queues.map((queue, place) => {
      const part = el("div", { class: `share share-${place}` });
      part.style.height = `${(100 * queue.hours[index]) / whole}%`;
      return part;
    });
    return el("div", { class: "day", title: `${labels[index]} ${WORDS[device]}` }, ...parts.reverse());
  });
  return el("div", {},
    el("div", { class: "shares", role: "img", "aria-label": `${WORDS[device]} of each day: ${labels.join("; ")}` }, ...columns),
    el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, days[0]), el("span", {}, "today, UTC")),
    el("ul", { class: "legend" }, ...queues.map((queue, place) => el("li", {},
      el("span", { class: `swatch share-${place}` }), queue.name,
      small(`${hours(sum(queue.hours))} ${WORDS[device]}${queue.goodput === null ? "" : `, goodput ${(100 * queue.goodput).toFixed(1)} %`}`)))));
}
