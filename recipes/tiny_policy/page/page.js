// The page of `realtime-omni demo robot`: shows what the robot's process reports, ten times a second, and sends what is clicked.
// Owns nothing: every report is complete, so a page that comes late or lost its connection shows the same.

const PAST = 24; // control steps behind the present that a plot shows
const HOVER = 0.03; // m that the open gripper appears higher in the picture than where it is
const NOTES = {
  none: "It does not: the old chunk is left at once, whatever the robot is doing.",
  auto: "Guided: each denoising step is drawn towards what is left of the old chunk.",
  identity: "Guided by the plain difference to what is left of the old chunk.",
  vjp: "Guided through the network's own derivative.",
  trained: "The actions that are decided are its beginning; the network was trained to go on from there.",
  overlap: "Blended into what is left of the old chunk.",
};
const COLOURS = { red: "#dc382e", blue: "#2b66d9", green: "#38a852" };

const $ = (id) => document.getElementById(id);
let setup = null;
let socket = null;
let report = null; // the latest
let painted = null; // the one that the picture above the table belongs to
let pictures = []; // times at which pictures came
let shown = 0;
let awaited = []; // which canvas the next pictures are for

// ---------------------------------------------------------------------- the connection

function connect() {
  socket = new WebSocket(new URL("live", location.href.replace(/^http/, "ws")));
  socket.binaryType = "blob";
  socket.onmessage = ({ data }) => (typeof data === "string" ? hear(JSON.parse(data)) : show(data));
  socket.onclose = () => {
    link("bad", "Not connected");
    setTimeout(connect, 1000);
  };
}

function hear(message) {
  if (message.type === "setup") {
    setup = message;
    build();
  } else {
    report = message;
    awaited = ["top", "wrist"];
    tell();
  }
}

async function show(jpeg) {
  const camera = awaited.shift();
  const belongs = report;
  const picture = await createImageBitmap(jpeg);
  const canvas = $(camera);
  const context = fitted(canvas);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  if (camera === "top") {
    painted = belongs;
    drawWay(context, canvas.width, painted);
    shown += 1;
    pictures = [...pictures.filter((at) => at > performance.now() - 2000), performance.now()];
  }
}

const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));

function link(tone, text) {
  $("link").dataset.tone = tone;
  $("link").lastElementChild.textContent = text;
}

// ---------------------------------------------------------------------- controls

function build() {
  link("good", "Live");
  $("policy").textContent = setup.policy;
  $("delay").max = setup.max_delay;
  $("tasks").replaceChildren(chip("Another one each time", null), ...setup.instructions.map((words, n) => chip(words, n)));
  $("joining-section").hidden = setup.joinings.length < 2;
  $("joinings").replaceChildren(...setup.joinings.map((joining) => button(joining, { type: "joining", joining })));
}

function chip(words, task) {
  const item = document.createElement("li");
  const [, colour, tray, below] = words.match(/(red|blue|green) block (?:in the (\w+) tray|on the (\w+) block)/) ?? [];
  item.toggleAttribute("data-wide", !colour);
  const pressed = button(tray ? `${tray} tray` : below ? `on ${below}` : words, { type: "task", task });
  if (colour) {
    pressed.title = words;
    pressed.setAttribute("aria-label", words);
    const mark = document.createElement("i");
    mark.style.setProperty("--tone", COLOURS[colour]);
    pressed.prepend(mark);
  }
  item.append(pressed);
  return item;
}

function button(text, command) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.value = JSON.stringify(command.task ?? command.joining ?? null);
  made.onclick = () => send(command);
  return made;
}

const press = (list, value) => {
  for (const one of list.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one.value === JSON.stringify(value)));
};

$("delay").oninput = () => tellDelay(Number($("delay").value));
$("delay").onchange = () => send({ type: "delay", delay: Number($("delay").value) });
$("new-scene").onclick = () => send({ type: "new_scene" });

const tellDelay = (delay) => {
  $("delay-text").textContent = delay === 0 ? "as they come" : `${delay} ticks, ${(delay * setup.tick_s).toFixed(1)} s`;
};

// ---------------------------------------------------------------------- numbers

function tell() {
  const words = setup.instructions[report.task];
  const seconds = (report.episode_tick * setup.tick_s).toFixed(1);
  $("words").textContent = words;
  document.querySelector(".top").dataset.phase = report.phase;
  const result = { running: "", solved: "Solved", failed: "Time is up" }[report.phase];
  if ($("result").textContent !== result) $("result").textContent = result;
  press($("tasks"), report.chosen);
  press($("joinings"), report.joining);
  $("joining-note").textContent = NOTES[report.joining] ?? "";
  if (document.activeElement !== $("delay") || report.delay === Number($("delay").value)) {
    $("delay").value = report.delay;
    tellDelay(report.delay);
  }
  tellScores();
  const answer = report.answer;
  strip({
    tick: report.tick,
    episode: report.phase === "running" ? `${seconds} s` : "over",
    "delay": answer ? `${answer.delay} ticks` : "–",
    "planned for": answer ? `${answer.planned_delay} ticks` : "–",
    "policy": answer ? `${answer.policy_ms.toFixed(0)} ms` : "–",
    "step late": `${report.late_ms.toFixed(0)} ms`,
    "pictures/s": (pictures.length / 2).toFixed(1),
  });
  plot("plot-x", 0, [-0.45, 0.45], "--x");
  plot("plot-y", 1, [-0.45, 0.45], "--y");
  plot("plot-grip", 2, [-0.25, 1.25], "--grip");
}

function tellScores() {
  const solved = report.scores.reduce((sum, one) => sum + one.solved, 0);
  const episodes = report.scores.reduce((sum, one) => sum + one.episodes, 0);
  const total = document.createElement("b");
  total.textContent = `${solved} of ${episodes}`;
  $("total").replaceChildren(total, " solved");
  const rows = report.scores.filter((one) => one.episodes || one.switches).map((one) => {
    const row = document.createElement("tr");
    row.toggleAttribute("data-now", one.delay === report.delay && one.joining === report.joining);
    const rate = one.episodes ? ` ${Math.round((100 * one.solved) / one.episodes)} %` : "";
    const jump = one.switches ? ((100 * one.jumps_mps) / one.switches).toFixed(1) : "–";
    for (const text of [one.delay || "0", one.joining || "–", `${one.solved}/${one.episodes}${rate}`, jump]) {
      row.insertCell().textContent = text;
    }
    return row;
  });
  $("scores").replaceChildren(...rows);
}

function strip(values) {
  if ($("strip").childElementCount === 0) {
    for (const name of Object.keys(values)) {
      const pair = document.createElement("div");
      pair.append(document.createElement("dt"), document.createElement("dd"));
      pair.firstChild.textContent = name;
      $("strip").append(pair);
    }
  }
  Object.values(values).forEach((value, n) => ($("strip").children[n].lastChild.textContent = value));
}

// ---------------------------------------------------------------------- drawing

/** The canvas's context, with as many pixels as the screen shows of it. */
function fitted(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const [w, h] = [width, height].map((side) => Math.max(1, Math.round(side * devicePixelRatio)));
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  return canvas.getContext("2d");
}

/** Where the plan leads, on the picture above the table: a dot per control step, larger where the gripper is to be closed. */
function drawWay(context, side, { plan, tool, low, phase }) {
  if (phase !== "running" || plan.length === 0) return;
  const unit = side / (2 * setup.half_m);
  let [x, y] = tool;
  const lift = low ? 0 : HOVER;
  for (const [vx, vy, grip] of plan) {
    x += vx * setup.tick_s;
    y += vy * setup.tick_s;
    context.beginPath();
    context.arc((x + setup.half_m) * unit, (setup.half_m - y - lift) * unit, side * (grip > 0.5 ? 0.0075 : 0.005), 0, 7);
    context.fillStyle = grip > 0.5 ? "#6a4be0" : "#e07800";
    context.fill();
    context.lineWidth = side * 0.0022;
    context.strokeStyle = "#fffd";
    context.stroke();
  }
}

/** One channel of the actions: executed on the left of the present, planned on the right of it. */
function plot(id, channel, [low, high], tone) {
  const canvas = $(id);
  const context = fitted(canvas);
  const { width: w, height: h } = canvas;
  const dot = devicePixelRatio;
  const now = report.tick;
  const unit = w / (PAST + setup.horizon);
  const at = (tick) => (tick - now + PAST) * unit;
  const head = 20 * dot; // the name of the channel
  const up = (value) => h - ((value - low) / (high - low)) * (h - head);
  context.clearRect(0, 0, w, h);
  const { answer } = report;
  if (answer && report.phase === "running") {
    context.fillStyle = "#ffffff10";
    context.fillRect(at(answer.start_tick), 0, answer.rows * unit, h);
    context.fillStyle = "#ff8a8030";
    context.fillRect(at(answer.start_tick), 0, answer.delay * unit, h);
  }
  rule(context, [0, up(0)], [w, up(0)], "#ffffff1f", dot);
  for (const one of report.past) if (one.switched) rule(context, [at(one.tick), h * 0.8], [at(one.tick), h], "#fff9", 1.5 * dot);
  const colour = getComputedStyle(document.documentElement).getPropertyValue(tone);
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 2 * dot;
  context.lineJoin = "round";
  context.beginPath();
  let pen = false;
  for (const { tick, action } of report.past) {
    if (action) context[pen ? "lineTo" : "moveTo"](at(tick + 0.5), up(action[channel]));
    pen = action !== null;
  }
  context.stroke();
  report.plan.forEach((action, n) => {
    context.beginPath();
    context.arc(at(now + n + 0.5), up(action[channel]), 1.7 * dot, 0, 7);
    context.fill();
  });
  rule(context, [at(now), 0], [at(now), h], "#ffffff73", dot);
}

function rule(context, from, to, colour, width) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}

/** For tests. */
globalThis.robotDemo = {
  stats: () => ({ ...report, shown, switches: report?.scores.find((one) => one.delay === report.delay && one.joining === report.joining)?.switches ?? 0 }),
};

connect();
