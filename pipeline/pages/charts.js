// Draws the charts of a page with uPlot in place of their SVG: the value under the pointer, zoom by dragging.
(() => {
  "use strict";
  const DASHES = [[], [6, 2], [2, 3], [8, 3, 2, 3]];
  const FONT = "12px system-ui, sans-serif";
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const tick = value => {
    const [size, unit] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"], [0, ""]].find(one => Math.abs(value) >= one[0]);
    return +(value / ({ k: 1e3 }[unit] || size || 1)).toPrecision(6) + unit;
  };

  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const say = (text, x, y) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = x + 14 + tip.offsetWidth > innerWidth ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 4)) + "px";
  };

  // What is not drawn by uPlot: its title becomes a tooltip without the browser's delay.
  document.querySelectorAll("svg .mark").forEach(mark => {
    const title = mark.querySelector("title");
    if (!title) return;
    const text = title.textContent;
    mark.setAttribute("aria-label", text);
    title.remove();
    mark.addEventListener("pointermove", event => say(text, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", () => say(""));
  });

  const MARKERS = [
    (path, x, y, r) => path.arc(x, y, r, 0, 7),
    (path, x, y, r) => path.rect(x - r, y - r, 2 * r, 2 * r),
    (path, x, y, r) => corners(path, [[x, y - 1.25 * r], [x + 1.15 * r, y + 0.8 * r], [x - 1.15 * r, y + 0.8 * r]]),
    (path, x, y, r) => corners(path, [[x, y - 1.3 * r], [x + 1.3 * r, y], [x, y + 1.3 * r], [x - 1.3 * r, y]]),
  ];
  const corners = (path, points) => {
    points.forEach(([x, y], at) => at ? path.lineTo(x, y) : path.moveTo(x, y));
    path.closePath();
  };

  function draw(u, chart) {
    const { ctx, bbox } = u, dot = devicePixelRatio;
    const place = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    ctx.save();
    ctx.font = `${12 * dot}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillStyle = css("--ink");
    ctx.fillText(chart.y.label, 2 * dot, 12 * dot);
    ctx.beginPath();
    ctx.rect(bbox.left - 6 * dot, bbox.top - 6 * dot, bbox.width + 12 * dot, bbox.height + 12 * dot);
    ctx.clip();
    ctx.lineCap = ctx.lineJoin = "round";
    const stroke = (points, color, width, dash) => {
      ctx.beginPath();
      points.forEach((at, i) => {
        if (!at) return;
        if (i && points[i - 1]) return ctx.lineTo(...at);
        ctx.moveTo(...at);
        if (!points[i + 1]) { ctx.moveTo(at[0] - 2 * dot, at[1]); ctx.lineTo(at[0] + 2 * dot, at[1]); }
      });
      ctx.strokeStyle = color;
      ctx.lineWidth = width * dot;
      ctx.setLineDash(dash.map(one => one * dot));
      ctx.stroke();
    };
    ctx.globalAlpha = 0.22;
    if ((chart.band || []).length > 1) stroke(chart.band.map(([x, y]) => place(x, y)), css("--soft"), 10, []);
    ctx.globalAlpha = 1;
    const taken = [], said = [];
    const places = chart.curves.map(curve => curve.x.map((x, i) => curve.y[i] == null ? null : place(x, curve.y[i])));
    chart.curves.forEach((curve, number) => {
      const color = css("--c" + curve.style), points = places[number];
      stroke(points, color, 2, curve.dashed ? [5, 4] : DASHES[curve.style % 4]);
      if (chart.along) return;
      ctx.setLineDash([]);
      points.forEach(([x, y], i) => {
        const path = new Path2D();
        MARKERS[curve.style % 4](path, x, y, Math.min(4.5 * dot, Math.max(dot, bbox.width / points.length / 3)));
        ctx.fillStyle = curve.hollow.includes(i) ? css("--panel") : color;
        ctx.fill(path);
        ctx.stroke(path);
        taken.push([x - 6 * dot, y - 6 * dot, x + 6 * dot, y + 6 * dot]);
      });
    });
    // A label goes to the first free side of its point, or is left out.
    ctx.fillStyle = css("--soft");
    ctx.strokeStyle = css("--panel");
    ctx.lineWidth = 4 * dot;
    ctx.setLineDash([]);
    chart.along || chart.curves.forEach((curve, number) => curve.labels.forEach((label, i) => {
      const [x, y] = places[number][i], wide = ctx.measureText(label).width;
      if (said.some(([other, a, b]) => other === label && Math.hypot(a - x, b - y) < 12 * dot)) return;
      said.push([label, x, y]);
      for (const [left, base] of [[x + 8 * dot, y - 5 * dot], [x - wide - 8 * dot, y - 5 * dot],
                                  [x + 8 * dot, y + 15 * dot], [x - wide - 8 * dot, y + 15 * dot]]) {
        const box = [left, base - 11 * dot, left + wide, base + 2 * dot];
        const inside = left > bbox.left && box[2] < bbox.left + bbox.width && box[1] > bbox.top;
        if (!inside || taken.some(o => o[0] < box[2] && box[0] < o[2] && o[1] < box[3] && box[1] < o[3])) continue;
        taken.push(box);
        ctx.strokeText(label, left, base);
        ctx.fillText(label, left, base);
        return;
      }
    }));
    ctx.restore();
  }

  // The words for a place of the pointer: of the nearest point, or, along a time axis, of each line.
  function under(u, chart) {
    const { left, top } = u.cursor;
    if (left < 0) return "";
    const lines = [];
    let best = 30, found = "", at = null;
    chart.curves.forEach(curve => {
      let near = null, least = Infinity;
      curve.x.forEach((x, i) => {
        if (curve.y[i] == null) return;
        const across = u.valToPos(x, "x") - left;
        const far = chart.along ? Math.abs(across) : Math.hypot(across, u.valToPos(curve.y[i], "y") - top);
        if (far < least) [least, near] = [far, i];
      });
      if (near == null) return;
      if (!chart.along) { if (least < best) [best, found] = [least, curve.titles[near]]; return; }
      if (least < 20) { at = curve.x[near]; lines.push(`${curve.name}: ${plain.format(curve.y[near])}`); }
    });
    return chart.along ? lines.length ? [...lines, `at ${plain.format(at)} s`].join("\n") : "" : found;
  }

  // Ticks of a logarithmic axis: 1, 2, 5, 10, ... where there is room, else powers of ten.
  const decades = (u, axis, low, high) => {
    const powers = [], all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      powers.push(10 ** power);
      all.push(...[1, 2, 5].map(digit => +`${digit}e${power}`));
    }
    const [few, many] = [powers, all].map(marks => marks.filter(one => one >= low * 0.999 && one <= high * 1.001));
    return many.length > 7 && few.length > 1 ? few : many.length > 1 ? many : [low, high];
  };

  function plot(box, chart, width, sync, last) {
    const scale = axis => ({ time: false, auto: false, distr: axis.log ? 3 : 1, range: (u, low, high) => [low, high] });
    const axis = (what, size, more) => ({
      ...(what.log && { splits: decades, filter: (u, splits) => splits }),
      stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, font: FONT, size,
      values: (u, splits) => splits.map(tick), ...more,
    });
    // Larger values are whole by their rounding, whether they are counts or not.
    const counts = chart.x.high <= 1000 && chart.curves.every(curve => curve.x.every(Number.isInteger))
      && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] };
    const whole = u => u.batch(() => ["x", "y"].forEach(k => u.setScale(k, { min: chart[k].low, max: chart[k].high })));
    const u = new uPlot({
      width, height: chart.along ? 125 + 20 * last : Math.round(Math.min(420, 180 + width / 5)), padding: [26, 18, 0, 0],
      legend: { show: false },
      cursor: {
        points: { show: false }, drag: { x: true, y: !chart.along, uni: 20 }, sync: sync && { key: sync },
        bind: { dblclick: u => () => whole(u) },
      },
      scales: { x: scale(chart.x), y: scale(chart.y) },
      axes: [
        axis(chart.x, 24, { space: 56, ...counts, ...(last && { label: chart.x.label, labelSize: 20, labelFont: FONT, labelGap: 0 }) }),
        axis(chart.y, 48, { space: 28 }),
      ],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: {
        draw: [u => draw(u, chart)],
        setCursor: [u => {
          if (u.cursor.event == null) return;
          const { left, top } = u.over.getBoundingClientRect();
          say(under(u, chart), left + u.cursor.left, top + u.cursor.top);
        }],
      },
    }, [[chart.x.low, chart.x.high], [chart.y.low, chart.y.high]], box);
    whole(u);
    u.over.addEventListener("mouseleave", () => say(""));
    return u;
  }

  const drawn = [];
  document.querySelectorAll("[data-charts]").forEach((figure, number) => {
    const charts = JSON.parse(figure.dataset.charts), box = figure.appendChild(document.createElement("div"));
    let plots = [];
    // A figure that is folded up has no width until it is opened.
    new ResizeObserver(() => {
      const width = Math.floor(figure.clientWidth);
      if (!width || matchMedia("print").matches) return;
      if (plots.length) return plots.forEach(u => u.width === width || u.setSize({ width, height: u.height }));
      plots = charts.map((chart, at) => plot(box, chart, width, charts.length > 1 && "figure" + number, at === charts.length - 1));
      drawn.push(...plots);
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
      figure.classList.add("drawn");
      document.getElementById("hint").hidden = false;
    }).observe(figure);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(u => u.redraw(false, true)));
})();
