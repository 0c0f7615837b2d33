/* Live figure: three ways to a derivative, and the step that a reader chooses.
   tests/book/test_live_figures.py holds the quotients against NumPy. */

/* Functions that JavaScript can evaluate at x + ih: [real part, imaginary part]. */
const STEP_FUNCTIONS = {
  "1 / (1 + t)": {
    at: (x, h) => { const d = (1 + x) * (1 + x) + h * h; return [(1 + x) / d, -h / d]; },
    value: (x) => 1 / (1 + x),
    slope: (x) => -1 / ((1 + x) * (1 + x)),
  },
  "exp t": {
    at: (x, h) => [Math.exp(x) * Math.cos(h), Math.exp(x) * Math.sin(h)],
    value: Math.exp,
    slope: Math.exp,
  },
};

function quotients({ at, value }, x, h) {
  return {
    forward: (value(x + h) - value(x)) / h,
    central: (value(x + h) - value(x - h)) / (2 * h),
    complex: at(x, h)[1] / h,
  };
}

if (typeof document !== "undefined") {
  (() => {
    const figure = document.getElementById("fig-right-v");
    if (!figure) return;
    const X = 0.7, LAST = -20, NAMES = { forward: "forward difference", central: "central difference", complex: "complex step" };
    const box = document.createElement("div");
    box.className = "live live-steps";
    box.innerHTML = `
      <div class="live-knobs">
        <label>function of t, at t = ${X}<select>${Object.keys(STEP_FUNCTIONS).map((name) => `<option>${name}</option>`).join("")}</select></label>
        <label>step h <output></output><input type="range" min="${LAST}" max="0" step="0.25" value="-4" aria-label="step, logarithmic"></label>
      </div>
      <div class="live-plot" aria-hidden="true"></div>
      <table><tbody></tbody></table>`;
    figure.after(box);
    const plot = box.querySelector(".live-plot"), knob = box.querySelector("input"), choice = box.querySelector("select");

    /* The digits up to the first wrong one, and the rest. */
    function digits(estimate, truth) {
      const error = Math.abs(estimate / truth - 1), text = estimate.toPrecision(17).replace("-", "−");
      if (!(error < 1)) return `<s>${text}</s>`;
      const right = Math.max(0, Math.floor(-Math.log10(Math.max(error, 1.2e-16)))), start = text.search(/[1-9]/);
      let at = start, seen = 0;
      while (at < text.length && seen < right) seen += /\d/.test(text[at++]);
      return `<b>${text.slice(0, at)}</b><s>${text.slice(at)}</s>`;
    }

    function draw() {
      const f = STEP_FUNCTIONS[choice.value], truth = f.slope(X), power = Number(knob.value), h = 10 ** power;
      const width = plot.clientWidth, height = 230, left = 44, floor = -17.5;
      const x = (p) => left + (width - left - 10) * (1 - p / LAST);
      const y = (error) => 22 + (Math.min(0.5, Math.max(floor, Math.log10(Math.max(error, 1e-17)))) * -1 + 0.5) * ((height - 50) / 18);
      const error = (name, p) => Math.abs(quotients(f, X, 10 ** p)[name] / truth - 1);
      const grid = Array.from({ length: 161 }, (_, i) => (LAST * i) / 160);
      const curve = (name) => grid.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(error(name, p)).toFixed(1)}`).join("");
      const raised = (p) => `10<tspan dy="-5" font-size="9">${String(p).replace("-", "−")}</tspan>`;
      const across = [0, -5, -10, -15, -20].map((p) => `<text x="${x(p)}" y="${height - 4}" text-anchor="middle">${raised(p)}</text>`);
      const up = [0, -4, -8, -12, -16].map((p) => `<line class="grid" x1="${left}" x2="${width - 10}" y1="${y(10 ** p)}" y2="${y(10 ** p)}"/>
        <text x="${left - 6}" y="${y(10 ** p) + 4}" text-anchor="end">${raised(p)}</text>`);
      plot.innerHTML = `<svg width="${width}" height="${height}">${up.join("")}${across.join("")}
        <text x="${left}" y="13">relative error, against the step h</text>
        <line class="cursor" x1="${x(power)}" x2="${x(power)}" y1="18" y2="${height - 22}"/>
        ${Object.keys(NAMES).map((name) => `<path class="curve ${name}" d="${curve(name)}"/>
          <circle class="${name}" r="5" cx="${x(power)}" cy="${y(error(name, power))}"/>`).join("")}</svg>`;
      const values = quotients(f, X, h);
      box.querySelector("output").textContent = h >= 0.01 ? h.toPrecision(2) : h.toExponential(1).replace("-", "−");
      knob.setAttribute("aria-valuetext", h.toExponential(1));
      box.querySelector("tbody").innerHTML = Object.entries(NAMES).map(([name, title]) =>
        `<tr><th scope="row" class="${name}">${title}</th><td>${digits(values[name], truth)}</td></tr>`).join("");
    }
    knob.addEventListener("input", draw);
    choice.addEventListener("input", draw);
    new ResizeObserver(draw).observe(box);
    draw();
  })();
}
