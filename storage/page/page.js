"use strict";
// The map of all steps: one cell each, and what is known of the chosen one as text. Loads nothing, writes no HTML.
(() => {
  const canvas = document.getElementById("cells");
  if (!canvas) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const said = document.getElementById("said"), field = document.getElementById("step");
  const bits = unpacked(data.runs), steps = bits.length, below = data.drawn - 1;
  const drawn = Array.from(bits.keys()).filter((step) => bits[step] & data.drawn);
  const legend = Array.from(document.querySelectorAll("[data-mark]"), (button) => ({
    button, number: Number(button.dataset.mark), label: button.textContent,
    sign: button.previousElementSibling, proves: button.closest("tr").lastElementChild.textContent,
  }));
  const marks = new Map(legend.map((mark) => [mark.number, mark]));
  const base = document.createElement("canvas");
  let chosen = 0, columns = 1, size = 1, width = 0;

  function unpacked(runs) {
    const parts = [];
    for (let i = 0; i < runs.length; i += 2) parts.push(new Uint16Array(runs[i]).fill(runs[i + 1]));
    const all = new Uint16Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) { all.set(part, at); at += part.length; }
    return all;
  }

  const colour = (step) => 31 - Math.clz32(bits[step] & below);
  const place = (step) => [4 + (step % columns) * size, 4 + Math.floor(step / columns) * size];

  // Cells of at least 9 pixels carry their sign; below that only drawn steps do, which are then drawn larger.
  function lay() {
    const width = canvas.clientWidth, height = Math.max(320, Math.min(640, innerHeight * 0.75));
    for (size = 24; size > 2 && Math.ceil(steps / across(width)) * size > height; size--);
    columns = Math.min(steps, across(width));
    const dense = devicePixelRatio || 1, rows = Math.ceil(steps / columns);
    canvas.style.height = `${rows * size + 8}px`;
    canvas.width = base.width = Math.round(width * dense);
    canvas.height = base.height = Math.round((rows * size + 8) * dense);
    document.getElementById("row").textContent = columns < steps ? `Each row holds ${columns} steps.` : "";
    paint();
  }

  // A round number of steps in a row, so that its beginning is easy to read.
  function across(width) {
    const most = Math.floor((width - 8) / size), round = most >= 100 ? 50 : most >= 20 ? 10 : 1;
    return Math.max(1, most - (most % round));
  }

  function paint() {
    const pen = base.getContext("2d"), dense = devicePixelRatio || 1, side = size > 5 ? size - 1 : size;
    const look = new Map(legend.map(({ number, sign }) => {
      const style = getComputedStyle(sign), path = new Path2D(sign.firstElementChild.getAttribute("d"));
      return [number, { fill: style.getPropertyValue("--fill"), ink: style.getPropertyValue("--ink"), path }];
    }));
    const page = getComputedStyle(document.documentElement);
    const paper = page.getPropertyValue("--paper"), text = page.getPropertyValue("--text");
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, base.width, base.height);
    for (let step = 0, until = 1; step < steps; step = until++) {
      const number = colour(step), [x, y] = place(step);
      if (size <= 5) while (until < steps && until % columns && colour(until) === number) until++;
      pen.fillStyle = look.get(number).fill;
      pen.fillRect(x, y, side + (until - step - 1) * size, side);
      if (size > 8) signed(look.get(number), x, y, side);
    }
    if (size <= 8) for (const step of drawn) {
      const [x, y] = place(step), mark = look.get(colour(step)), left = x + size / 2 - 5, top = y + size / 2 - 5;
      pen.fillStyle = paper;
      pen.fillRect(left - 1, top - 1, 12, 12);
      pen.fillStyle = mark.fill;
      pen.fillRect(left, top, 10, 10);
      signed(mark, left, top, 10);
    }
    if (size > 8) for (const step of drawn) {
      const [x, y] = place(step);
      pen.strokeStyle = text;
      pen.lineWidth = 2;
      pen.strokeRect(x, y, side, side);
    }
    show();

    function signed({ ink, path }, left, top, wide) {
      pen.save();
      pen.translate(left, top);
      pen.scale(wide / 8, wide / 8);
      pen.strokeStyle = ink;
      pen.lineCap = "round";
      pen.stroke(path);
      pen.restore();
    }
  }

  // What was painted, with a frame around the chosen step.
  function show() {
    const pen = canvas.getContext("2d"), dense = devicePixelRatio || 1, [x, y] = place(chosen);
    const side = Math.max(size > 5 ? size - 1 : size, 6), inset = (side - size) / 2 + 1.5;
    const page = getComputedStyle(document.documentElement);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(base, 0, 0);
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    for (const [ink, width] of [["--paper", 5], ["--text", 2]]) {
      pen.strokeStyle = page.getPropertyValue(ink);
      pen.lineWidth = width;
      pen.strokeRect(x - inset, y - inset, size + 2 * inset, size + 2 * inset);
    }
  }

  function told(step) {
    const number = colour(step), held = [];
    for (const mark of legend) {
      if (mark.number && mark.number !== number && bits[step] & (1 << mark.number)) held.push(mark.label);
    }
    const also = held.length ? ` (also ${held.join(", ")})` : "";
    const head = `Step ${step.toLocaleString("en")}: ${marks.get(number).label}${also}.`;
    return [`${head} ${marks.get(number).proves}`, ...(data.notes[step] || [])].join("\n");
  }

  function choose(step) {
    chosen = Math.max(0, Math.min(steps - 1, step));
    field.value = chosen;
    canvas.setAttribute("aria-valuenow", chosen);
    canvas.setAttribute("aria-valuetext", `step ${chosen}: ${marks.get(colour(chosen)).label}`);
    said.textContent = told(chosen);
    show();
  }

  function seek(way, fits) {
    for (let i = 1; i <= steps; i++) {
      const step = (chosen + way * i + steps) % steps;
      if (fits(step)) return choose(step);
    }
    return undefined;
  }
  const next = () => seek(1, (step) => bits[step] & data.drawn);
  const previous = () => seek(-1, (step) => bits[step] & data.drawn);

  const keys = {
    ArrowRight: () => choose(chosen + 1), ArrowLeft: () => choose(chosen - 1),
    ArrowDown: () => choose(chosen + columns < steps ? chosen + columns : chosen),
    ArrowUp: () => choose(chosen >= columns ? chosen - columns : chosen),
    PageDown: () => choose(chosen + 10 * columns), PageUp: () => choose(chosen - 10 * columns),
    Home: () => choose(0), End: () => choose(steps - 1),
    n: next, p: previous,
  };
  canvas.addEventListener("keydown", (event) => {
    const move = keys[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move();
  });
  canvas.addEventListener("click", (event) => {
    const [column, row] = [event.offsetX, event.offsetY].map((at) => Math.max(0, Math.floor((at - 4) / size)));
    const step = row * columns + column;
    if (column < columns && step < steps) choose(step);
  });
  document.getElementById("find").addEventListener("submit", (event) => {
    event.preventDefault();
    choose(Math.floor(Number(field.value)));
  });
  document.getElementById("after").addEventListener("click", next);
  document.getElementById("before").addEventListener("click", previous);
  for (const { button, number } of legend) {
    button.addEventListener("click", () => seek(1, (step) => colour(step) === number));
  }
  for (const id of ["after", "before"]) document.getElementById(id).disabled = !drawn.length;

  new ResizeObserver(() => {
    if (canvas.clientWidth === width) return;
    width = canvas.clientWidth;
    lay();
  }).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  width = canvas.clientWidth;
  lay();
  choose(0);
  performance.mark("map");
})();
