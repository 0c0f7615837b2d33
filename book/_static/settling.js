/* Live figure: how fast the gain of a local level settles, for a share q of level noise. */

(() => {
  const figure = document.getElementById("fig-steady-nile");
  if (!figure || typeof localLevel === "undefined") return;
  const STEPS = 40, CLOSE = 1e-13;
  const box = document.createElement("div");
  box.className = "live live-settling";
  box.innerHTML = `
    <div class="live-knobs">
      <label>q = σ²<sub>η</sub> / σ²<sub>ε</sub> <output data-value="q"></output>
        <input type="range" min="-4" max="2" step="0.05" value="-1" aria-label="ratio of the variances, logarithmic"></label>
      <p>Steady gain <output data-value="gain"></output><br>within 10<sup>−13</sup> after <output data-value="steps"></output></p>
    </div>
    <div class="live-plot" aria-hidden="true"></div>`;
  /* Below the head of the chapter, which is to fit on a screen. */
  (document.querySelector("p.prerequisites") || figure).after(box);
  const plot = box.querySelector(".live-plot"), knob = box.querySelector("input");
  const say = (name, text) => { box.querySelector(`[data-value=${name}]`).textContent = text; };

  function draw() {
    const q = 10 ** Number(knob.value);
    /* With a unit measurement variance the filtered variance is the gain; the data do not matter. */
    const gains = localLevel(new Array(4000).fill(0), { a0: 0, P0: 1e7, H: 1, Q: q }).variance;
    const predicted = (q + Math.sqrt(q * q + 4 * q)) / 2, steady = predicted / (1 + predicted);
    const settled = gains.findIndex((gain) => Math.abs(gain / steady - 1) < CLOSE);
    const width = plot.clientWidth, height = 190, left = 44;
    const x = (t) => left + ((width - left - 10) * t) / (STEPS - 1), y = (gain) => 22 + (1 - gain) * (height - 46);
    const ticks = [0, 0.5, 1].map((gain) => `<line class="grid" x1="${left}" x2="${width - 10}" y1="${y(gain)}" y2="${y(gain)}"/>
      <text x="${left - 6}" y="${y(gain) + 4}" text-anchor="end">${gain}</text>`);
    const times = [1, 10, 20, 30, 40].map((t) => `<text x="${x(t - 1)}" y="${height - 4}" text-anchor="middle">${t}</text>`);
    const dots = gains.slice(0, STEPS).map((gain, t) => `<circle class="forward" r="3" cx="${x(t)}" cy="${y(gain)}"/>`);
    plot.innerHTML = `<svg width="${width}" height="${height}">${ticks.join("")}${times.join("")}
      <text x="${left}" y="13">gain of step t, and the steady gain</text>
      <line class="limit" x1="${left}" x2="${width - 10}" y1="${y(steady)}" y2="${y(steady)}"/>${dots.join("")}</svg>`;
    const text = q.toPrecision(2);
    say("q", text);
    say("gain", steady.toFixed(4));
    say("steps", `${settled + 1} steps`);
    knob.setAttribute("aria-valuetext", text);
  }
  knob.addEventListener("input", draw);
  new ResizeObserver(draw).observe(box);
  draw();
})();
