/* The live figure of the landing page. It takes the place of the picture that is there without it. */

(() => {
  const host = document.querySelector(".nile-live");
  if (!host || typeof NILE === "undefined") return;

  const RANGE = { H: [2, 6], Q: [0, 5] }; /* powers of ten of the two variances */
  const NAMES = { H: "measurement variance", Q: "level variance" };
  const SYMBOLS = { H: "σ²<sub>ε</sub>", Q: "σ²<sub>η</sub>" };
  const start = { H: NILE.model.H, Q: NILE.model.Q, at: 28 }; /* the estimates, and 1899 */
  const state = { ...start, gaps: new Set(), climb: 0 };
  const n = NILE.y.length;
  const year = (t) => NILE.first + t;

  const evaluate = (H = state.H, Q = state.Q) =>
    localLevel(NILE.y.map((value, t) => (state.gaps.has(t) ? null : value)), { ...NILE.model, H, Q });

  /* The score for the natural logarithms of the variances. */
  const logScore = (result) => [state.H * result.score.H, state.Q * result.score.Q];

  host.insertAdjacentHTML(
    "afterbegin",
    `<div class="live" role="group" aria-label="Local level model of the Nile, to play with">
      <div class="live-knobs">
        ${["H", "Q"].map((name) => `<label>${SYMBOLS[name]} <span>${NAMES[name]}</span>
          <output data-value="${name}"></output>
          <input type="range" min="${RANGE[name][0]}" max="${RANGE[name][1]}" step="0.01"
            data-knob="${name}" aria-label="${NAMES[name]}, logarithmic"></label>`).join("")}
      </div>
      <p class="live-sum" aria-live="polite"></p>
      <div class="live-series" tabindex="0" role="slider" aria-label="Year; Enter removes or restores its observation"
        aria-valuemin="${year(0)}" aria-valuemax="${year(n - 1)}"></div>
      <div class="live-below">
        <div class="live-adjoint" aria-hidden="true"></div>
        <div class="live-map" aria-hidden="true"><canvas></canvas>
          <small>log-likelihood: log ${SYMBOLS.H} →, log ${SYMBOLS.Q} ↑</small></div>
        <div class="live-says">
          <p>Log-likelihood <output data-value="loglik"></output></p>
          <p>Its score, for log ${SYMBOLS.H} and log ${SYMBOLS.Q}: <output data-value="score"></output></p>
          <p><button type="button" data-do="toggle"></button>
          <button type="button" data-do="climb">Climb along the score</button>
          <button type="button" data-do="reset">Reset</button></p>
        </div>
      </div>
    </div>`,
  );
  host.classList.add("is-live");
  const part = (selector) => host.querySelector(selector);
  const series = part(".live-series"), below = part(".live-adjoint"), map = part(".live-map");
  const sum = part(".live-sum");

  /* --- drawing ------------------------------------------------------------------------------- */

  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const LEFT = 44, RIGHT = 8;
  const across = (width) => (t) => LEFT + ((width - LEFT - RIGHT) * t) / (n - 1);

  function axis(width, height, y, ticks, label) {
    const x = across(width);
    const years = [1880, 1900, 1920, 1940, 1960].map((value) => value - NILE.first);
    return (
      ticks.map((tick) => `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}" y1="${y(tick)}" y2="${y(tick)}"/>` +
        `<text x="${LEFT - 6}" y="${y(tick) + 4}" text-anchor="end">${minus(String(tick))}</text>`).join("") +
      years.map((t) => `<text x="${x(t)}" y="${height - 4}" text-anchor="middle">${year(t)}</text>`).join("") +
      `<text x="${LEFT}" y="13">${label}</text>`
    );
  }

  function drawSeries(result) {
    const width = series.clientWidth, height = 230;
    const x = across(width), y = (value) => 24 + ((1500 - value) * (height - 50)) / 1150;
    const line = (values) => path(values.map((value, t) => [x(t), y(value)]));
    const edge = (sign) => result.filtered.map((value, t) => [x(t), y(value + sign * 2 * Math.sqrt(result.variance[t]))]);
    const dots = NILE.y.map((value, t) =>
      `<circle cx="${x(t)}" cy="${y(value)}" r="${t === state.at ? 5 : 3}" class="${state.gaps.has(t) ? "gap" : "seen"}"/>`);
    const from = y(result.predicted[state.at]), to = y(result.smoothed[state.at]), step = to > from ? -7 : 7;
    const arrow = `<path class="sum" d="M${x(state.at)} ${from}V${to}m-5 ${step}l5 ${-step}l5 ${step}"/>
      <circle class="sum" cx="${x(state.at)}" cy="${from}" r="4"/>`;
    series.innerHTML = `<svg width="${width}" height="${height}" aria-hidden="true">
      ${axis(width, height, y, [400, 800, 1200], width > 480 ? "flow of the Nile, 10⁸ m³ a year" : "10⁸ m³ a year")}
      <clipPath id="live-clip"><rect x="${LEFT}" y="18" width="${width - LEFT}" height="${height - 38}"/></clipPath>
      <g clip-path="url(#live-clip)"><path class="band" d="${path([...edge(1), ...edge(-1).reverse()])}Z"/>
      <path class="filtered" d="${line(result.filtered)}"/><path class="smoothed" d="${line(result.smoothed)}"/></g>
      <line class="cursor" x1="${x(state.at)}" x2="${x(state.at)}" y1="20" y2="${height - 20}"/>${dots.join("")}${arrow}
      <g class="legend" transform="translate(${width - RIGHT},13)"><text text-anchor="end"><tspan class="filtered">filter, ± 2 sd</tspan>
      <tspan class="smoothed" dx="8">smoother</tspan></text></g></svg>`;
    const gap = state.gaps.has(state.at), says = whatItAdds(result);
    sum.innerHTML = `<b>${year(state.at)}</b>: ${says.map(([word, value]) => `<span>${word} <output>${value}</output></span>`).join(" ")}`;
    part("[data-do=toggle]").textContent = `${gap ? "Restore" : "Remove"} the observation of ${year(state.at)}`;
    series.setAttribute("aria-valuenow", year(state.at));
    series.setAttribute("aria-valuetext", `${year(state.at)}: ${NILE.y[state.at]}, ${gap ? "removed" : "observed"}`);
  }

  /* The sum of the marked year, rounded as one would write it. */
  function whatItAdds({ predicted, spread, adjoint, smoothed }) {
    const t = state.at, whole = (value) => minus(value.toFixed(0));
    const slope = minus(adjoint[t].toFixed(Math.abs(adjoint[t]) < 0.001 ? 6 : 4));
    return [
      ["predicted", whole(predicted[t])], ["+ variance", whole(spread[t])],
      ["× derivative", adjoint[t] < 0 ? `(${slope})` : slope], ["= smoothed", whole(smoothed[t])],
    ];
  }

  function drawAdjoint(result) {
    const width = below.clientWidth, height = 152, x = across(width);
    const most = Math.max(...result.adjoint.map(Math.abs)) || 1;
    const scale = 10 ** Math.ceil(Math.log10(most)), tick = most > scale / 2 ? scale / 2 : scale / 5;
    const y = (value) => 76 - (value * 52) / most;
    const bars = result.adjoint.map((value, t) =>
      `<line class="bar${t === state.at ? " at" : ""}" x1="${x(t)}" x2="${x(t)}" y1="${y(0)}" y2="${y(value)}"/>`);
    const text = "∂(log-likelihood) / ∂(predicted level)";
    below.innerHTML = `<svg width="${width}" height="${height}">
      ${axis(width, height, y, [0, ...(tick <= most ? [tick, -tick] : [])], text).replace(/(\d)\.?0*e-/g, "$1e−")}
      ${bars.join("")}</svg>`;
  }

  const SIDE = 170, CELLS = 56;
  const place = ([h, q]) => [
    ((h - RANGE.H[0]) / (RANGE.H[1] - RANGE.H[0])) * SIDE,
    SIDE - ((q - RANGE.Q[0]) / (RANGE.Q[1] - RANGE.Q[0])) * SIDE,
  ];
  let surface;

  function computeMap() {
    const values = [];
    for (let row = 0; row < CELLS; row++) {
      for (let column = 0; column < CELLS; column++) {
        const h = RANGE.H[0] + ((column + 0.5) / CELLS) * (RANGE.H[1] - RANGE.H[0]);
        const q = RANGE.Q[1] - ((row + 0.5) / CELLS) * (RANGE.Q[1] - RANGE.Q[0]);
        values.push(evaluate(10 ** h, 10 ** q).loglik);
      }
    }
    const best = Math.max(...values);
    surface = values.map((value) => best - value);
  }

  function drawMap(result) {
    const canvas = map.querySelector("canvas"), sharp = window.devicePixelRatio || 1;
    canvas.width = canvas.height = SIDE * sharp;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const style = getComputedStyle(map), cell = SIDE / CELLS;
    const bands = [1, 3, 6, 12, 25, 50, 100, 200];
    pen.fillStyle = style.getPropertyValue("--live-filter");
    surface.forEach((loss, i) => {
      const band = bands.findIndex((bound) => loss < bound);
      pen.globalAlpha = band < 0 ? 0.04 : 0.75 - 0.08 * band;
      pen.fillRect((i % CELLS) * cell, Math.floor(i / CELLS) * cell, cell + 0.5, cell + 0.5);
    });
    pen.globalAlpha = 1;
    const [x, y] = place([Math.log10(state.H), Math.log10(state.Q)]);
    const [gh, gq] = logScore(result), size = Math.hypot(gh, gq);
    pen.strokeStyle = pen.fillStyle = style.color;
    pen.lineWidth = 2.5;
    pen.beginPath();
    pen.arc(x, y, 5, 0, 7);
    pen.fill();
    if (size > 0.02) {
      const length = 12 + 10 * Math.log1p(size);
      const along = [(gh / size) * (SIDE / 4), (-gq / size) * (SIDE / 5)];
      const unit = Math.hypot(...along), to = [x + (along[0] / unit) * length, y + (along[1] / unit) * length];
      const angle = Math.atan2(along[1], along[0]);
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(...to);
      for (const side of [-0.5, 0.5]) {
        pen.moveTo(...to);
        pen.lineTo(to[0] - 9 * Math.cos(angle + side), to[1] - 9 * Math.sin(angle + side));
      }
      pen.stroke();
    }
  }

  const minus = (text) => text.replace(/^-(?=0\.0*$)/, "").replace("-", "−");

  function draw() {
    if (!series.clientWidth) return; /* not shown */
    const result = evaluate();
    drawSeries(result);
    drawAdjoint(result);
    drawMap(result);
    for (const name of ["H", "Q"]) {
      const text = Number(state[name].toPrecision(state[name] < 100 ? 2 : 4)).toLocaleString("en");
      part(`[data-value=${name}]`).textContent = text;
      const knob = part(`[data-knob=${name}]`);
      knob.setAttribute("aria-valuetext", text);
      if (document.activeElement !== knob || state.climb) knob.value = Math.log10(state[name]);
    }
    part("[data-value=loglik]").textContent = minus(result.loglik.toFixed(2));
    part("[data-value=score]").textContent = logScore(result).map((value) => minus(value.toFixed(2))).join(", ");
  }

  /* --- what a reader does --------------------------------------------------------------------- */

  function toggle() {
    if (!state.gaps.delete(state.at)) state.gaps.add(state.at);
    stop();
    computeMap();
    draw();
  }

  function stop() {
    cancelAnimationFrame(state.climb);
    state.climb = 0;
  }

  /* Steepest ascent in the two logarithms, its steps by Barzilai and Borwein. */
  function climb() {
    stop();
    let step = 0.02, before, steps = 0;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const move = () => {
      const g = logScore(evaluate());
      if (before) {
        const change = [g[0] - before.g[0], g[1] - before.g[1]];
        const bend = Math.abs(before.by[0] * change[0] + before.by[1] * change[1]);
        if (bend > 0) step = (before.by[0] ** 2 + before.by[1] ** 2) / bend;
      }
      const size = step * Math.hypot(...g), shrink = Math.min(1, 0.8 / size);
      const by = g.map((value) => value * step * shrink), was = [state.H, state.Q];
      ["H", "Q"].forEach((name, i) => {
        const [low, high] = RANGE[name];
        state[name] = Math.min(10 ** high, Math.max(10 ** low, was[i] * Math.exp(by[i])));
      });
      before = { g, by };
      steps += 1;
      return Math.hypot(...g) > 1e-4 && steps < 200;
    };
    const frame = () => {
      const more = move();
      draw();
      state.climb = more ? requestAnimationFrame(frame) : 0;
    };
    if (still) {
      while (move());
      draw();
    } else {
      state.climb = requestAnimationFrame(frame);
    }
  }

  for (const knob of host.querySelectorAll("[data-knob]")) {
    knob.addEventListener("input", () => {
      stop();
      state[knob.dataset.knob] = 10 ** Number(knob.value);
      draw();
    });
  }
  for (const chart of [series, below]) {
    chart.addEventListener("click", (event) => {
      const box = chart.getBoundingClientRect();
      const t = ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (n - 1);
      state.at = Math.min(n - 1, Math.max(0, Math.round(t)));
      draw();
    });
  }
  series.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -n, End: n };
    if (event.key in moves) state.at = Math.min(n - 1, Math.max(0, state.at + moves[event.key]));
    else if (event.key === "Enter" || event.key === " ") toggle();
    else return;
    event.preventDefault();
    draw();
  });
  map.addEventListener("click", (event) => {
    const box = map.querySelector("canvas").getBoundingClientRect();
    const share = [(event.clientX - box.left) / box.width, 1 - (event.clientY - box.top) / box.height];
    stop();
    ["H", "Q"].forEach((name, i) => {
      state[name] = 10 ** (RANGE[name][0] + share[i] * (RANGE[name][1] - RANGE[name][0]));
    });
    draw();
  });
  part("[data-do=toggle]").addEventListener("click", toggle);
  part("[data-do=climb]").addEventListener("click", climb);
  part("[data-do=reset]").addEventListener("click", () => {
    stop();
    Object.assign(state, start);
    state.gaps.clear();
    computeMap();
    draw();
  });

  computeMap();
  draw();
  new ResizeObserver(draw).observe(host);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
})();
