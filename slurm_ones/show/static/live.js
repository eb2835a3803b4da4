// Replaces what changed on the page at each tick of the companion, and keeps what the reader is doing.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const part = document.body.dataset.part;
  const state = document.getElementById("state");
  let shown = document.body.dataset.number;
  let busy = false;
  let again = false;

  // Unchanged text is not written again: screen readers would read it again.
  function write(place, text) {
    if (place !== null && place.textContent !== text) place.textContent = text;
  }

  const say = (text) => write(state, text);
  const made = (tag, values) => Object.assign(document.createElement(tag), values);

  function replace(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    for (const section of fresh.querySelectorAll("section[id]")) {
      const old = document.getElementById(section.id);
      if (old === null) {
        document.querySelector("main").append(section);
      } else if (chosen(old)) {
        again = true; // replaced once nothing of it is selected
      } else if (old.innerHTML !== section.innerHTML) {
        const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        const scrolled = [...old.querySelectorAll(".wide")].map((box) => box.scrollLeft);
        old.replaceChildren(...section.childNodes);
        [...old.querySelectorAll(".wide")].forEach((box, n) => (box.scrollLeft = scrolled[n] || 0));
        const same = [...old.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused);
        if (same !== undefined) same.focus({ preventScroll: true });
      }
    }
    decorate();
  }

  // Text that the reader has selected stays until it is copied.
  function chosen(section) {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && selection.containsNode(section, true);
  }

  async function look(number) {
    if (number !== null && number === shown) return;
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      const answer = await fetch(`${root}/${part}?part=1&${new URLSearchParams(location.search)}`, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(await answer.text());
      replace(await answer.text());
      shown = number;
      say("live");
    } catch (error) {
      say(`not live: ${String(error.message || error).slice(0, 200)}`);
    } finally {
      busy = false;
      lookAgain();
    }
  }

  function lookAgain() {
    if (!again || busy || !document.getSelection().isCollapsed) return;
    again = false;
    look(null);
  }

  const field = document.getElementById("filter");
  const FIRST = 10; // rows of a long table that are shown until the reader asks for all
  const sorted = new Map(); // by section: [column, direction]
  const whole = new Set(); // sections of which all rows are shown

  function filter() {
    const words = field === null ? [] : field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const body of document.querySelectorAll("tbody.filtered")) {
      const id = body.closest("section").id;
      const cut = body.classList.contains("first") && !whole.has(id) && words.length === 0;
      [...body.rows].forEach((row, n) => {
        const text = words.length === 0 ? "" : row.textContent.toLowerCase();
        const fits = words.every((word) => text.includes(word));
        row.hidden = !fits || (cut && n >= FIRST);
        if (fits) found += 1;
      });
      const button = body.closest("section").querySelector(".more");
      if (button !== null) button.hidden = !cut;
    }
    const count = found === 0 ? "nothing found" : `${found} found`;
    write(document.getElementById("found"), words.length === 0 ? "" : count);
  }

  const order = new Intl.Collator(undefined, { numeric: true });

  function sort(section, column, direction) {
    for (const table of section.querySelectorAll("table")) {
      const rows = [...table.tBodies[0].rows];
      const text = (row) => row.cells[column].textContent;
      rows.sort((a, b) => (text(a) === "–") - (text(b) === "–") || direction * order.compare(text(a), text(b)));
      table.tBodies[0].append(...rows);
      [...table.tHead.rows[0].cells].forEach((cell, n) => {
        if (n === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        else cell.removeAttribute("aria-sort");
      });
    }
  }

  // What scripts add to a section, once it is new.
  function decorate() {
    for (const head of document.querySelectorAll("section th")) {
      if (head.querySelector("button") !== null || head.textContent === "") continue;
      const onclick = () => {
        const section = head.closest("section");
        const [column, direction] = sorted.get(section.id) || [-1, 1];
        sorted.set(section.id, [head.cellIndex, column === head.cellIndex ? -direction : 1]);
        sort(section, ...sorted.get(section.id));
        filter();
      };
      head.replaceChildren(made("button", { textContent: head.textContent, onclick }));
    }
    for (const [id, by] of sorted) {
      const section = document.getElementById(id);
      if (section !== null) sort(section, ...by);
    }
    for (const body of document.querySelectorAll("tbody.first")) {
      const section = body.closest("section");
      if (body.rows.length <= FIRST || section.querySelector(".more") !== null) continue;
      const onclick = () => { whole.add(section.id); filter(); };
      section.append(made("button", { className: "more", textContent: `show all ${body.rows.length}`, onclick }));
    }
    document.querySelectorAll("figure[data-begin]").forEach(crosshair);
    filter();
  }

  // A line at the pointer, and below the picture who held what then.
  function crosshair(figure) {
    if (figure.querySelector(".at") !== null) return;
    const picture = figure.querySelector("svg");
    const said = made("p", { className: "at" });
    picture.after(said);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cross");
    line.setAttribute("y2", "100%");
    const [begin, end, capacity, most] = ["begin", "end", "capacity", "most"].map((name) => Number(figure.dataset[name]));
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const at = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      line.setAttribute("x1", `${100 * at}%`);
      line.setAttribute("x2", `${100 * at}%`);
      picture.append(line);
      const held = [];
      let gpus = 0;
      for (const shape of picture.querySelectorAll("rect:not(.over)")) {
        const left = shape.x.baseVal.value / 1000;
        if (at < left || at >= left + shape.width.baseVal.value / 1000) continue;
        const [, job, count] = shape.textContent.match(/^(.*): (\d+) GPUs/s) || [];
        if (count === undefined) continue;
        held.push(`${job}: ${count}`);
        gpus += Number(count);
      }
      const corner = [...(picture.querySelector(".rest")?.points || [])].findLast((point) => point.x <= 1000 * at);
      const others = corner === undefined ? "" : `; jobs that did not opt in: ${Math.round(capacity - most * (1 - corner.y / 240))}`;
      const when = new Date(1000 * (begin + at * (end - begin))).toLocaleString();
      const more = held.length > 8 ? ` and ${held.length - 8} more` : "";
      said.textContent = (held.length === 0 ? when : `${when}: ${gpus} GPUs (${held.slice(0, 8).join(", ")}${more})`) + others;
    });
    picture.addEventListener("pointerleave", () => { line.remove(); said.textContent = ""; });
  }

  if (field !== null) {
    field.value = new URLSearchParams(location.search).get("filter") || "";
    field.addEventListener("input", () => {
      const asked = new URLSearchParams(location.search);
      if (field.value === "") asked.delete("filter");
      else asked.set("filter", field.value);
      history.replaceState(null, "", asked.size === 0 ? location.pathname : `?${asked}`);
      filter();
    });
  }
  document.addEventListener("selectionchange", lookAgain);
  decorate();

  const events = new EventSource(`${root}/events`);
  events.onmessage = (event) => {
    if (event.data === shown) say("live");
    else look(event.data);
  };
  events.onerror = () => {
    // A server that was started anew counts from 1 again.
    shown = null;
    say("not live: the server does not answer; trying again");
  };
  // Where too many listen already, and after a laptop has slept.
  setInterval(() => { if (events.readyState === EventSource.CLOSED) look(null); }, 60000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(null); });
})();
