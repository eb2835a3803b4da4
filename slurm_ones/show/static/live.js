// Replaces what changed on the page at each tick of the companion, and keeps what the reader is doing.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const part = document.body.dataset.part;
  const state = document.getElementById("state");
  let shown = document.body.dataset.number;
  let busy = false;
  let again = false;

  function say(text) {
    if (state.textContent !== text) state.textContent = text;
  }

  function replace(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    for (const section of fresh.querySelectorAll("section[id]")) {
      const old = document.getElementById(section.id);
      if (old === null) {
        document.querySelector("main").append(section);
      } else if (old.innerHTML !== section.innerHTML) {
        const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        const scrolled = [...old.querySelectorAll(".wide")].map((box) => box.scrollLeft);
        old.replaceChildren(...section.childNodes);
        [...old.querySelectorAll(".wide")].forEach((box, n) => (box.scrollLeft = scrolled[n] || 0));
        if (focused !== null) {
          for (const link of old.querySelectorAll("a")) {
            if (link.getAttribute("href") === focused) {
              link.focus({ preventScroll: true });
              break;
            }
          }
        }
      }
    }
    filter();
  }

  async function look(number) {
    if (number !== null && number === shown) return;
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      const answer = await fetch(`${root}/${part}?part=1`, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(await answer.text());
      replace(await answer.text());
      shown = number;
      say("live");
    } catch (error) {
      say(`not live: ${String(error.message || error).slice(0, 200)}`);
    } finally {
      busy = false;
      if (again) {
        again = false;
        look(null);
      }
    }
  }

  function filter() {
    const field = document.getElementById("filter");
    if (field === null) return;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("tbody.filtered tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }

  const field = document.getElementById("filter");
  if (field !== null) field.addEventListener("input", filter);

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
