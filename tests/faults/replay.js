"use strict";
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const byId = (id) => document.getElementById(id);
  const slider = byId("slider");
  const list = byId("events").querySelector("tbody");
  let at = 0;

  function cell(row, content, kind) {
    const made = row.insertCell();
    if (kind) made.className = kind;
    made.append(content);
  }

  // A name and a value each, as text.
  function facts(pairs) {
    const made = document.createElement("ul");
    for (const [name, value] of pairs) {
      const item = document.createElement("li");
      const label = document.createElement("span");
      label.textContent = `${name}: `;
      item.append(label, value);
      made.append(item);
    }
    return made;
  }

  function stood(track) {
    let found = null;
    for (const entry of track) {
      if (entry[0] > at) break;
      found = entry;
    }
    return found;
  }

  function fill(body, tracks, counted) {
    body.replaceChildren();
    for (const [name, track] of tracks) {
      const found = stood(track);
      if (found === null) continue;
      const row = body.insertRow();
      cell(row, name);
      cell(row, found[1]);
      if (counted) cell(row, String(found[2]), "n");
      cell(row, facts(found[3]), "long");
    }
  }

  function show(index) {
    at = Math.min(Math.max(index, 0), run.times.length - 1);
    const time = `${run.times[at].toFixed(1)} s`;
    byId("clock").textContent = time;
    slider.value = String(at);
    const now = run.events.filter((event) => event[0] === at).map((event) => event[2]);
    slider.setAttribute("aria-valuetext", time);
    byId("said").textContent = now.length ? now.slice(0, 6).join("; ") + (now.length > 6 ? `; ${now.length - 6} more` : "") : "a state changes";
    for (const line of document.querySelectorAll(".cursor")) {
      line.setAttribute("x1", run.x[at]);
      line.setAttribute("x2", run.x[at]);
    }
    fill(byId("jobs"), run.jobs, true);
    fill(byId("others"), run.others, false);
    let first = null;
    run.events.forEach((event, n) => {
      const row = list.rows[n];
      row.className = event[0] === at ? "at" : event[0] < at ? "past" : "";
      if (event[0] === at && first === null) first = row;
    });
    if (first !== null) byId("events").scrollTop = first.offsetTop - 60;
  }

  function next(kind) {
    const found = run.events.find((event) => event[1] === kind && event[0] > at) || run.events.find((event) => event[1] === kind);
    if (found) show(found[0]);
  }

  for (const [index, kind, text] of run.events) {
    const row = list.insertRow();
    cell(row, run.times[index].toFixed(1), "n");
    cell(row, kind);
    cell(row, text, "long");
    row.addEventListener("click", () => show(index));
  }
  slider.max = String(run.times.length - 1);
  slider.addEventListener("input", () => show(Number(slider.value)));
  byId("back").addEventListener("click", () => show(at - 1));
  byId("on").addEventListener("click", () => show(at + 1));
  for (const kind of ["fault", "violation"]) {
    byId(kind).addEventListener("click", () => next(kind));
    byId(kind).disabled = !run.events.some((event) => event[1] === kind);
  }
  for (const picture of document.querySelectorAll(".row svg")) {
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * 1000;
      let index = run.x.findIndex((one) => one >= x);
      show(index < 0 ? run.x.length - 1 : index);
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target === slider) return;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: run.times.length - 1 };
    if (event.key in moves) show(moves[event.key]);
    else if (event.key === "f") next("fault");
    else if (event.key === "v") next("violation");
    else return;
    event.preventDefault();
  });
  show(0);
  const first = run.events.find((event) => event[1] === "violation");
  if (first) show(first[0]);
})();
