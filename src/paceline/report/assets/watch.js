// Asks for the state of the runs and exchanges what has changed. Where the reader is (open boxes, focus) stays.
(() => {
  const PAUSE_MS = 700;
  const shown = {};
  let name = "", timer;
  const status = document.createElement("p");
  Object.assign(status, { className: "unfinished", hidden: true });
  status.setAttribute("role", "status");
  document.body.prepend(status);

  const titleOf = (box) => box.id || box.querySelector("summary").textContent;
  function exchange(section, html) {
    const turned = (box) => box.open !== (box.dataset.sent === "open"); // by the reader; other boxes are as they were sent
    const was = new Map([...section.querySelectorAll("details")].filter(turned).map((box) => [titleOf(box), box.open]));
    const focused = section.contains(document.activeElement) && document.activeElement.tagName === "SUMMARY" ? titleOf(document.activeElement.parentElement) : null;
    section.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.purge(chart));
    section.innerHTML = html;
    for (const box of section.querySelectorAll("details")) {
      box.dataset.sent = box.open ? "open" : "closed";
      box.open = was.get(titleOf(box)) ?? box.open;
      if (titleOf(box) === focused) box.querySelector("summary").focus();
    }
  }
  function take(state) {
    name = state.name;
    for (const [part, html] of Object.entries(state.sections)) {
      if (shown[part] === html) continue;
      shown[part] = html;
      exchange(document.getElementById(`part-${part}`), html);
    }
    page.show(state.data);
  }
  async function ask() {
    clearTimeout(timer);
    try {
      const answer = await fetch(`state?seen=${name}`);
      if (answer.status === 200) take(await answer.json());
      else if (answer.status !== 204) throw new Error(`answer ${answer.status}`);
      status.hidden = true;
    } catch {
      status.textContent = "paceline watch does not answer; what is shown may be old. Still trying.";
      status.hidden = false;
    }
    timer = setTimeout(ask, PAUSE_MS);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); }); // timers of a hidden page are slow
  ask();
})();
