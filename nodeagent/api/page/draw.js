// Elements, made of text only: whatever a person called a job or wrote as a reason stays text.

export function el(name, options = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value !== undefined && value !== "") made.setAttribute(key, value);
  }
  made.append(...inside.filter((part) => part !== null && part !== undefined && part !== ""));
  return made;
}

const ROLES = { tr: "row", td: "cell", th: "rowheader" };

/** A row of a table. Each cell: [column's name, what is in it, class]. The roles are given, since narrow screens show
 * rows as cards, which would take the table's meaning away. */
export function row(cells, options = {}) {
  const made = el("tr", { role: ROLES.tr, ...options });
  cells.forEach(([label, inside, kind], index) => {
    const name = index ? "td" : "th";
    const parts = Array.isArray(inside) ? inside : [inside];
    const none = parts.every((part) => part === null || part === undefined || part === "");
    const more = index ? { "data-label": label } : { scope: "row" };
    const box = index && !none ? [el("div", {}, ...parts)] : parts;
    made.append(el(name, { role: ROLES[name], class: [kind, none ? "none" : ""].filter(Boolean).join(" "), ...more }, ...box));
  });
  return made;
}

export const small = (text) => (text ? el("small", {}, text) : null);
export const badge = (text, tone) => el("span", { class: "badge", "data-tone": tone }, text);

/** Makes the parent's children one for each [key, data]; what has not changed is left alone, so that what is open,
 * selected or has the focus stays so. */
export function keep(parent, entries, make) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const [key, data] of entries) {
    const drawn = JSON.stringify(data);
    let child = before.get(key);
    if (child === undefined || child.drawn !== drawn) {
      const open = new Set([...(child?.querySelectorAll("details[open]") ?? [])].map((d) => d.dataset.name));
      const fresh = make(data);
      fresh.dataset.key = key;
      fresh.drawn = drawn;
      for (const details of fresh.querySelectorAll("details")) details.open = open.has(details.dataset.name);
      if (child) {
        if (child === place) place = fresh;
        child.replaceWith(fresh);
      }
      child = fresh;
    }
    before.delete(key);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const gone of before.values()) gone.remove();
}

// --- words and times; the agent's clock, not the browser's

let skew = 0;
export const clock = () => Date.now() / 1000 + skew;
export function setClock(now) { skew = now - Date.now() / 1000; }

export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s < 1 ? s.toFixed(2) : s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function at(unix) {
  const when = new Date(unix * 1000);
  const today = when.toDateString() === new Date(clock() * 1000).toDateString();
  return today ? when.toLocaleTimeString("sv-SE") : when.toLocaleString("sv-SE"); // Swedish dates are ISO dates
}

/** How long ago, counted on by ``tick``. */
export function since(unix) {
  return el("time", { "data-since": String(unix), datetime: new Date(unix * 1000).toISOString() }, long(unix));
}
const long = (unix) => {
  const seconds = Math.max(0, Math.floor(clock() - unix));
  return seconds < 60 ? `${seconds} s` : span(seconds);
};
export function tick() {
  for (const time of document.querySelectorAll("time[data-since]")) time.textContent = long(Number(time.dataset.since));
}

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

/** "0-3, 8" of [0, 1, 2, 3, 8]. */
export function ranges(numbers) {
  const out = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = out.at(-1);
    if (last && last[1] === n - 1) last[1] = n;
    else out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}
