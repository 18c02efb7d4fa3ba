// Asks the gateway for figures every second and draws them.

import { SERIES, bar, bars, clock, count, make, size, span, stacked, table, trace } from "/page/plots.js";

const EVERY_MS = 1000, PREFIXES_EVERY_MS = 30000, BINS = 48;
const at = (id) => document.getElementById(id);
const samples = [];
let key = sessionStorage.getItem("kvd-key") || "";
let prefixesAt = 0;

async function get(path) {
  const reply = await fetch(path, { headers: key ? { "x-api-key": key } : {}, cache: "no-store" });
  if (reply.status === 401) throw new Error("key");
  if (!reply.ok) throw new Error(`the gateway answered ${reply.status}`);
  return reply.json();
}

function say(text, kind) {
  at("state").textContent = text;
  at("state").className = `state ${kind}`;
}

function ask(needed) {
  at("key").hidden = !needed;
  at("main").hidden = needed;
}

async function look() {
  const since = samples.length ? samples[samples.length - 1].t : 0;
  try {
    const data = await get(`/page/data?since=${since}`);
    ask(false);
    samples.push(...data.samples);
    samples.splice(0, samples.length - 720);
    if (data.error) say(data.error, "bad");
    else say("live", "good");
    if (data.status) show(data);
    if (Date.now() - prefixesAt > PREFIXES_EVERY_MS) {
      prefixesAt = Date.now();
      showPrefixes((await get("/page/prefixes")).prefixes);
    }
  } catch (problem) {
    if (problem.message === "key") ask(true);
    say(problem.message === "key" ? "needs a key" : "the gateway does not answer", "bad");
  }
}

function show({ status, now, saved_s, recent }) {
  at("about").textContent = `${status.version ?? ""} · up ${span(status.uptime_s ?? 0)}`;
  showTiles(status, saved_s);
  showTime(now);
  showLive(status.requests ?? []);
  showModels(status.models ?? []);
  const memory = status.memory ?? {}, store = status.store ?? {};
  shares("memory", memory.by_model ?? {}, memory.budget_bytes, "memory", "No model is loaded.");
  shares("disk", store.models ?? {}, store.limit, "ssd", store.problem || "Nothing is stored.");
  showMisses(status.metrics ?? []);
  showRecent(recent);
}

function totals(status) {
  const metric = (status.metrics ?? []).find((one) => one.name === "kvd_prompt_tokens_total");
  const values = metric ? metric.values : {};
  return { memory: values.cached_memory ?? 0, ssd: values.cached_ssd ?? 0, computed: values.computed ?? 0 };
}

function showTiles(status, saved) {
  const { memory, ssd, computed } = totals(status);
  const all = memory + ssd + computed, store = status.store ?? {}, held = status.memory ?? {};
  const tiles = [
    [all ? Math.round((100 * (memory + ssd)) / all) + " %" : "–", "of prompt tokens reused"],
    [span(saved), "prefill saved by reuse"],
    [count(memory + ssd), `tokens reused, ${count(ssd)} from SSD`],
    [count(computed), "prompt tokens computed"],
    [size(held.used_bytes ?? 0), `memory of ${size(held.budget_bytes ?? 0)}`],
    [size(store.used ?? 0), `SSD of ${size(store.limit ?? 0)}`],
  ];
  at("tiles").replaceChildren(
    ...tiles.map(([value, label]) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, label))),
  );
}

// Counters are sums since the daemon's start; a bar is what was added in its slice of time.
function binned(now) {
  const from = samples[0].t, width = Math.max(now - from, 60) / BINS;
  const bins = Array.from({ length: BINS }, (_, index) => ({
    from: from + index * width, to: from + (index + 1) * width, memory: 0, ssd: 0, computed: 0,
  }));
  for (let index = 1; index < samples.length; index++) {
    const bin = bins[Math.min(BINS - 1, Math.floor((samples[index].t - from) / width))];
    for (const [name, source] of [["memory", "cached_memory"], ["ssd", "cached_ssd"], ["computed", "computed"]]) {
      const [before, after] = [samples[index - 1][source] ?? 0, samples[index][source] ?? 0];
      bin[name] += after >= before ? after - before : after; // smaller: the daemon was started anew
    }
  }
  return bins;
}

function showTime(now) {
  if (!samples.length) return;
  stackedOnce(binned(now));
  trace(at("saved"), samples.map((one) => ({ t: one.t, value: one.saved_s })), span, "Prefill seconds saved, summed");
}

// A plot under the pointer is left alone: its tip would vanish with it.
function stackedOnce(bins) {
  if (!at("tokens").matches(":hover")) stacked(at("tokens"), bins);
}

function showLive(requests) {
  const rows = requests.filter((one) => !["status", "ping", "models", "cache"].includes(one.kind)).map((one) => {
    const progress = one.progress, queued = one.queued;
    const total = Math.max(1, progress?.total ?? 1);
    const drawn = progress
      ? bar([["memory", progress.cached / total], ["computed", (progress.done - progress.cached) / total]])
      : queued ? `place ${queued.position + 1} in line` : "";
    const figures = progress ? `${count(progress.done)} / ${count(progress.total)}, ${count(progress.cached)} reused` : "";
    return [one.model || "–", one.kind, one.stage, drawn, figures, span(one.age_s), one.id.slice(0, 8)];
  });
  const columns = [["model", ""], ["verb", ""], ["stage", ""], ["prefill", ""], ["tokens", "number"], ["age", "number"], ["id", ""]];
  table(at("live"), columns, rows, "Nothing runs.");
}

function showModels(models) {
  const rows = models.map((one) => [
    one.name, one.state + (one.pinned ? ", pinned" : ""), one.kv_precision ?? one.kv ?? "",
    one.pool_bytes ? size(one.pool_bytes) : "",
    one.blocks_total ? bar([["memory", one.blocks_live / one.blocks_total], ["cached", one.blocks_cached / one.blocks_total]]) : "",
    one.live ?? "", one.waiting ?? "", (one.warnings ?? []).join("; "),
  ]);
  const columns = [
    ["model", ""], ["state", ""], ["KV", ""], ["pool", "number"], ["in use, cached, free", ""], ["live", "number"],
    ["waiting", "number"], ["", "words"],
  ];
  table(at("models"), columns, rows, "No model is here yet: kvd pull demo");
}

function shares(id, by, limit, name, empty) {
  const found = Object.entries(by).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const full = limit || Math.max(1, ...found.map(([, bytes]) => bytes));
  bars(at(id), found.map(([model, bytes]) => [model, [[name, bytes / full]], size(bytes)]), empty);
}

function showMisses(metrics) {
  const metric = metrics.find((one) => one.name === "kvd_cache_misses_total");
  const found = Object.entries(metric ? metric.values : {}).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...found.map(([, times]) => times));
  const rows = found.map(([reason, times]) => [reason.replaceAll("_", " "), [["computed", times / most]], count(times)]);
  bars(at("misses"), rows, "Every prompt was reused to its end.");
}

function showPrefixes(prefixes) {
  const rows = prefixes.map((one) => [one.preview || "…", one.model, count(one.tokens), size(one.bytes), count(one.hits)]);
  const columns = [["begins with", "words"], ["model", ""], ["tokens", "number"], ["size", "number"], ["hits", "number"]];
  table(at("prefixes"), columns, rows, "Nothing is stored.");
}

function showRecent(recent) {
  const rows = recent.toReversed().slice(0, 20).map((one) => {
    const total = Math.max(1, one.prompt);
    const parts = bar([["memory", one.memory / total], ["ssd", one.ssd / total], ["computed", one.computed / total]]);
    const why = one.miss_reason ? one.miss_reason.replaceAll("_", " ") + (one.divergence === null ? "" : ` at ${count(one.divergence)}`) : "";
    return [clock(one.t), one.model || "default", count(one.prompt), parts, count(one.computed), span(one.ttft_s), span(one.saved_s), why];
  });
  const columns = [
    ["time", ""], ["model", ""], ["prompt", "number"], ["memory, SSD, computed", ""], ["computed", "number"],
    ["first token", "number"], ["saved", "number"], ["not reused because", ""],
  ];
  table(at("recent"), columns, rows, "None yet.");
}

async function loop() {
  if (!document.hidden) await look();
  setTimeout(loop, EVERY_MS);
}

at("legend").replaceChildren(
  ...SERIES.map(([name, label]) => make("span", {}, make("i", { class: `swatch ${name}` }), label)),
);
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key-text").value;
  sessionStorage.setItem("kvd-key", key);
  look();
});
get("/page/access").then(({ needs_key }) => {
  ask(needs_key && !key);
  if (needs_key && !key) say("needs a key", "bad");
  const begin = () => (key || !needs_key ? loop() : setTimeout(begin, 200));
  begin();
}, () => say("the gateway does not answer", "bad"));
