"use strict";
// Asks for text and shows it as it comes. Everything that comes is written by textContent, never as markup.
const field = (id) => document.getElementById(id);
let asking = null;

function settings() {
  const body = { model: field("model").dataset.name, prompt: field("prompt").value, stream: true };
  for (const name of ["max_tokens", "temperature", "top_k", "top_p", "seed"]) {
    if (field(name).value !== "") body[name] = Number(field(name).value);
  }
  return body;
}

function say(words, failed = false) {
  field("state").textContent = words;
  field("state").classList.toggle("failed", failed);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function write(signal) {
  const started = performance.now();
  let tokens = 0;
  const answer = await fetch("/v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(settings()), signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    field("made").append(choice.text);
    tokens += choice.text === "" ? 0 : 1;
    const rate = Math.round((1000 * tokens) / (performance.now() - started));
    say(choice.finish_reason ? `Done (${choice.finish_reason}), ${rate} pieces/s` : `${tokens} pieces`);
  }
}

async function go() {
  if (asking || !field("form").reportValidity()) return;
  asking = new AbortController();
  field("go").disabled = true;
  field("stop").disabled = false;
  field("given").textContent = field("prompt").value;
  field("made").textContent = "";
  say("Waiting");
  try {
    await write(asking.signal);
  } catch (error) {
    if (asking.signal.aborted) say("Stopped");
    else say(error instanceof TypeError ? "paceline serve does not answer" : error.message, true);
  }
  asking = null;
  field("go").disabled = false;
  field("stop").disabled = true;
}

field("form").addEventListener("submit", (event) => { event.preventDefault(); go(); });
field("stop").addEventListener("click", () => asking?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") asking?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); }
});
