"use strict";
// Asks for text and shows it as it comes. Everything that comes is written by textContent, never as markup.
const field = (id) => document.getElementById(id);
let asking = null;

function settings() {
  const body = { model: field("model").dataset.name, prompt: field("prompt").value, stream: true,
    stream_options: { include_usage: true }, seed: crypto.getRandomValues(new Uint32Array(1))[0] };
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

async function write(body, signal) {
  const started = performance.now(), rate = (count) => Math.round((1000 * count) / (performance.now() - started));
  let pieces = 0, end = "";
  const answer = await fetch("/v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      const count = event.usage.completion_tokens;
      say(`Done (${end}): ${count} tokens, ${rate(count)} tokens/s, seed ${body.seed}`);
      continue;
    }
    const choice = event.choices[0];
    field("made").append(choice.text);
    pieces += choice.text === "" ? 0 : 1;
    end = choice.finish_reason;
    say(`${pieces} pieces, ${rate(pieces)}/s, seed ${body.seed}`);
  }
}

async function go() {
  if (asking || !field("form").reportValidity()) return;
  asking = new AbortController();
  const body = settings();
  field("go").disabled = field("more").disabled = true;
  field("stop").disabled = false;
  field("given").textContent = field("prompt").value;
  field("made").textContent = "";
  say("Waiting");
  try {
    await write(body, asking.signal);
  } catch (error) {
    if (asking.signal.aborted) say(`Stopped, seed ${body.seed}`);
    else say(error instanceof TypeError ? "paceline serve does not answer" : error.message, true);
  }
  asking = null;
  field("go").disabled = false;
  field("more").disabled = field("made").textContent === "";
  field("stop").disabled = true;
}

field("form").addEventListener("submit", (event) => { event.preventDefault(); go(); });
field("more").addEventListener("click", () => {
  field("prompt").value = field("text").textContent;
  go();
});
field("stop").addEventListener("click", () => asking?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") asking?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); }
});
