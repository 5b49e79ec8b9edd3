"use strict";
// What a page draws of its data: text goes in as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b2a000", "#7a7a80"];
  const make = (tag, attributes = {}, text = "", space = null) => {
    const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== "") element.textContent = text;
    return element;
  };
  const svg = (tag, attributes, text = "") => make(tag, attributes, text, SVG);
  const scaled = (value, base, units) => {
    let step = 0;
    while (value >= 999.5 && step + 1 < units.length) { value /= base; step += 1; }
    const digits = value >= 99.5 || value === 0 ? 0 : value >= 9.95 ? 1 : 2;
    return `${value.toFixed(step ? digits : Number.isInteger(value) ? 0 : 2)} ${units[step]}`;
  };
  const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  const seconds = (value) =>
    value >= 1 ? `${value.toPrecision(3)} s` : value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} µs`;
  const count = (value) => Math.round(value).toLocaleString("en");

  // Round values between two logarithms: as few digits as tell four of them apart.
  const ticks = (low, high, unit) => {
    let values = [];
    for (let digits = 1; digits <= 3 && values.length < 4; digits += 1)
      values = [...new Set([0, 1, 2, 3, 4, 5].map((k) => Number((Math.exp(low + ((high - low) * k) / 5) / unit).toPrecision(digits)) * unit))]
        .filter((value) => Math.log(value) >= low && Math.log(value) <= high);
    return values;
  };

  const landscape = () => {
    const room = document.getElementById("landscape-picture");
    if (!room) return;
    const { points, chosen, words, defaults } = data.landscape;
    const panel = document.getElementById("landscape-panel"), choose = document.getElementById("landscape-colour");
    const WIDTH = 860, HEIGHT = 400, LEFT = 76, TOP = 14, RIGHT = 16, BOTTOM = 44, FAR = 8;
    const all = [...points, chosen];
    const limit = data.fitting || Infinity;
    const near = data.fitting && data.fitting < FAR * Math.max(...all.map((p) => p.b));
    const xs = all.map((p) => Math.log(p.b)), ys = all.map((p) => Math.log(p.s));
    const pad = (low, high) => { const more = Math.max((high - low) * 0.06, 0.03); return [low - more, high + more]; };
    const [x0, x1] = pad(Math.min(...xs), Math.max(...xs, near ? Math.log(data.fitting) : -Infinity));
    const [y0, y1] = pad(Math.min(...ys), Math.max(...ys));
    const X = (b) => LEFT + ((WIDTH - LEFT - RIGHT) * (Math.log(b) - x0)) / (x1 - x0);
    const Y = (s) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (Math.log(s) - y0) / (y1 - y0));
    const told = (p) => ["mesh " + p.mesh, ...Object.entries(p.decided).map(([w, v]) => `${w} ${v}`)].join(", ");
    const line = (p) => `${seconds(p.s)} per step, ${bytes(p.b)} per device${p.fits ? "" : ", does not fit"}: ${told(p)}`;
    const value = (p, word) =>
      word === "fits" ? (p.fits ? "fits" : "does not fit")
        : word.startsWith("axis ") ? String(p.axes[word.slice(5)] || 1)
          : p.decided[word] || defaults[word];
    const options = ["fits", ...["stage", "data", "fsdp", "expert", "context", "tensor"].map((a) => "axis " + a), ...words]
      .filter((word) => new Set(points.map((p) => value(p, word))).size > 1);
    for (const word of options) choose.append(make("option", { value: word }, word.replace("axis ", "size of ").replaceAll("_", " ")));
    if (!options.length) choose.append(make("option", { value: "fits" }, "fits"));

    const picture = svg("svg", { class: "picture", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "listbox", tabindex: "0",
      "aria-label": `${points.length} plans by time and memory; arrow keys go from one to the next, Enter compares` });
    const grid = svg("g", { "aria-hidden": "true" });
    const unit = 1024 ** Math.min(5, Math.floor(x1 / Math.log(1024)));
    for (const b of ticks(x0, x1, unit)) {
      grid.append(svg("line", { class: "grid", x1: X(b), x2: X(b), y1: TOP, y2: HEIGHT - BOTTOM }));
      grid.append(svg("text", { class: "soft", x: X(b), y: HEIGHT - BOTTOM + 16, "text-anchor": X(b) > WIDTH - RIGHT - 30 ? "end" : "middle" }, bytes(b)));
    }
    for (const s of ticks(y0, y1, 1)) {
      grid.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: Y(s), y2: Y(s) }));
      grid.append(svg("text", { class: "soft", x: LEFT - 6, y: Y(s) + 4, "text-anchor": "end" }, seconds(s)));
    }
    grid.append(svg("text", { class: "soft", x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "memory per device (logarithmic)"));
    grid.append(svg("text", { class: "soft", x: LEFT + 4, y: TOP + 10 }, "seconds per step (logarithmic)"));
    if (data.fitting && !near)
      grid.append(svg("text", { x: WIDTH - RIGHT - 4, y: TOP + 12, "text-anchor": "end" }, `memory that plans may fill: ${bytes(data.fitting)}, far to the right`));
    if (near && Math.log(data.fitting) > x0) {
      grid.append(svg("line", { class: "limit", x1: X(limit), x2: X(limit), y1: TOP, y2: HEIGHT - BOTTOM }));
      grid.append(svg("text", { x: X(limit) - 5, y: HEIGHT - BOTTOM - 6, "text-anchor": "end" }, "memory that plans may fill"));
    }
    const front = [];
    for (const p of [...points].sort((a, b) => a.s - b.s || a.b - b.b))
      if (p.fits && (!front.length || p.b < front[front.length - 1].b)) front.push(p);
    grid.append(svg("polyline", { class: "front", points: front.map((p) => `${X(p.b)},${Y(p.s)}`).join(" ") }));
    picture.append(grid);
    const order = [...points.keys()].sort((a, b) => points[a].s - points[b].s || points[a].b - points[b].b);
    const marks = points.map((p, i) => {
      const mark = svg("circle", { class: p.fits ? "point" : "point unfit", cx: X(p.b).toFixed(1), cy: Y(p.s).toFixed(1), r: 6,
        role: "option", id: `plan-${i}`, "aria-selected": "false", "aria-label": line(p) });
      mark.append(svg("title", {}, line(p)));
      mark.addEventListener("pointerenter", () => show(i));
      mark.addEventListener("click", () => { show(i); compare(i); });
      return mark;
    });
    for (const i of order) picture.append(marks[i]);
    const star = svg("path", { class: "limit", fill: "none", d: `M ${X(chosen.b) - 13} ${Y(chosen.s)} h 26 m -13 -13 v 26`, "aria-hidden": "true", "pointer-events": "none", style: "stroke-dasharray: none" });
    picture.append(star, svg("text", { class: "halo", x: X(chosen.b) + (X(chosen.b) > WIDTH * 0.7 ? -12 : 12), y: Y(chosen.s) - 10, "aria-hidden": "true",
      "text-anchor": X(chosen.b) > WIDTH * 0.7 ? "end" : "start" }, "chosen"));
    room.append(picture);

    let now = -1;
    const show = (i) => {
      if (now >= 0) { marks[now].classList.remove("now"); marks[now].setAttribute("aria-selected", "false"); }
      now = i;
      marks[i].classList.add("now");
      marks[i].setAttribute("aria-selected", "true");
      picture.setAttribute("aria-activedescendant", `plan-${i}`);
      panel.textContent = line(points[i]);
    };
    const compare = (i) => {
      const other = points[i], table = make("table"), head = make("tr");
      for (const text of ["", "chosen", "this plan", "change"]) head.append(make("th", { scope: "col" }, text));
      table.append(make("caption", { class: "soft" }, "The chosen plan beside the one that was picked"), head);
      const ratio = (a, b) => `${(b / a).toFixed(2)}x`;
      const rows = [["per step", seconds(chosen.s), seconds(other.s), ratio(chosen.s, other.s)], ["per device", bytes(chosen.b), bytes(other.b), ratio(chosen.b, other.b)],
        ["mesh", chosen.mesh, other.mesh, chosen.mesh === other.mesh ? "same" : "differs"]];
      for (const word of words) {
        const a = chosen.decided[word] || defaults[word], b = other.decided[word] || defaults[word];
        if (a !== b) rows.push([word.replaceAll("_", " "), a, b, "differs"]);
      }
      for (const row of rows) {
        const line = make("tr");
        row.forEach((text, k) => line.append(make(k ? "td" : "th", k ? {} : { scope: "row" }, text)));
        table.append(line);
      }
      const wide = make("div", { class: "wide" });
      wide.append(table);
      document.getElementById("landscape-compared").replaceChildren(wide);
    };
    const paint = () => {
      const seen = [...new Set(points.map((p) => value(p, choose.value)))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const colour = new Map(seen.map((v, k) => [v, COLOURS[Math.min(k, COLOURS.length - 1)]]));
      points.forEach((p, i) => { marks[i].style.fill = colour.get(value(p, choose.value)); });
      document.getElementById("landscape-legend").replaceChildren(...seen.map((v, k) => {
        const entry = make("span"), swatch = make("i");
        swatch.style.background = COLOURS[Math.min(k, COLOURS.length - 1)];
        entry.append(swatch, v);
        return entry;
      }));
    };
    choose.addEventListener("change", paint);
    picture.addEventListener("keydown", (event) => {
      const at = order.indexOf(now);
      const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: order.length - 1 }[event.key];
      if (to !== undefined) { event.preventDefault(); show(order[Math.max(0, Math.min(order.length - 1, to))]); }
      if ((event.key === "Enter" || event.key === " ") && now >= 0) { event.preventDefault(); compare(now); }
    });
    paint();
  };

  const arrays = () => {
    const room = document.getElementById("array-picture");
    if (!room) return;
    const choose = document.getElementById("array-choose"), forms = document.getElementById("array-forms"), sliders = document.getElementById("array-device");
    const panel = document.getElementById("array-panel");
    const device = Object.fromEntries(data.axes.map((axis) => [axis.name, 0]));
    const size = Object.fromEntries(data.axes.map((axis) => [axis.name, axis.size]));
    let form = 0;
    for (const group of ["parameters", "activations", "batch"]) {
      const some = make("optgroup", { label: group });
      data.arrays.forEach((one, i) => { if (one.group === group) some.append(make("option", { value: i }, one.name)); });
      if (some.children.length) choose.append(some);
    }
    for (const axis of data.axes) {
      const label = make("label"), slider = make("input", { type: "range", min: 0, max: axis.size - 1, value: 0, id: `device-${axis.name}` });
      const shown = make("output", {}, "0");
      slider.addEventListener("input", () => { device[axis.name] = Number(slider.value); shown.textContent = slider.value; draw(); });
      label.append(`${axis.name} (${count(axis.size)})`, slider, shown);
      sliders.append(label);
    }
    const part = (axes) => axes.reduce(([at, ways], axis) => [at * (size[axis] || 1) + (device[axis] || 0), ways * (size[axis] || 1)], [0, 1]);
    const buttons = (one) => {
      forms.replaceChildren(...one.forms.map((each, i) => {
        const button = make("button", { type: "button", "aria-pressed": String(i === form) }, each.words);
        button.addEventListener("click", () => { form = i; draw(); forms.children[i].focus(); });
        return button;
      }));
    };
    const draw = () => {
      const one = data.arrays[choose.value];
      form = Math.min(form, one.forms.length - 1);
      buttons(one);
      const dims = one.forms[form].dims.map((axes, i) => ({ axes, n: one.shape[i], name: one.names[i] || `dim ${i}`, part: part(axes) }));
      const where = data.axes.map((axis) => `${axis.name} ${device[axis.name]}`).join(", ") || "the only device";
      const whole = one.shape.length ? one.shape.reduce((a, b) => a * b, 1) * one.item : 0;
      const ways = dims.reduce((a, d) => a * d.part[1], 1);
      const held = dims.map((d) => {
        const [at, w] = d.part;
        if (d.n === undefined) return `part ${at + 1} of ${w} of dim ${d.name}`;
        return w === 1 ? `all ${count(d.n)} of ${d.name}` : `${count((d.n / w) * at)} to ${count((d.n / w) * (at + 1) - 1)} of ${count(d.n)} of ${d.name} (sharded over ${d.axes.join("·")})`;
      });
      const sums = one.forms[form].sums || [], own = one.group === "activations";
      const copies = data.axes.map((axis) => axis.name)
        .filter((name) => !dims.some((d) => d.axes.includes(name)) && !sums.includes(name) && !(own && name === "stage"));
      panel.textContent = `${one.forms[form].text}. The device at ${where} holds ${held.join("; ") || "all of it"}` +
        (whole ? `: ${bytes(whole / ways)} of ${bytes(whole)}` : "") + "." +
        (copies.length ? ` All devices along ${copies.join(" and ")} hold the same.` : sums.length || !data.axes.length ? "" : " No two devices hold the same part.") +
        (sums.length ? ` Devices along ${sums.join(" and ")} have different partial sums of it.` : "") +
        (own && size.stage > 1 ? " Every stage has those of its own layers." : "") +
        (own && data.microbatches > 1 ? ` That is of the whole batch; it comes in ${data.microbatches} microbatches, one after another.` : "");
      room.replaceChildren(grid(dims));
    };
    const grid = (dims) => {
      const sorted = dims.map((d, i) => ({ ...d, i })).sort((a, b) => b.part[1] - a.part[1] || (b.n || 0) - (a.n || 0)).slice(0, 2).sort((a, b) => a.i - b.i);
      const [rows, columns] = sorted.length > 1 ? sorted : [{ part: [0, 1], name: "", n: 1, axes: [] }, sorted[0] || { part: [0, 1], name: "", n: 1, axes: [] }];
      const LEFT = 170, TOP = 26, W = 680, H = 230;
      const picture = svg("svg", { class: "picture", viewBox: `0 0 860 ${TOP + H + 12}`, role: "img", "aria-label": `An array as a grid of ${rows.part[1]} by ${columns.part[1]} shards with the shard of one device` });
      const lines = (d) => Math.min(d.part[1], 64);
      const colour = (axes) => (axes.length ? data.axes.find((axis) => axis.name === axes[axes.length - 1]) || {} : {}).colour || "var(--soft)";
      picture.append(svg("rect", { class: "faint", x: LEFT, y: TOP, width: W, height: H }));
      for (let k = 1; k < lines(rows); k += 1) picture.append(svg("line", { x1: LEFT, x2: LEFT + W, y1: TOP + (H * k) / lines(rows), y2: TOP + (H * k) / lines(rows), style: `stroke: ${colour(rows.axes)}; stroke-width: ${lines(rows) > 32 ? 0.5 : 1.5}` }));
      for (let k = 1; k < lines(columns); k += 1) picture.append(svg("line", { y1: TOP, y2: TOP + H, x1: LEFT + (W * k) / lines(columns), x2: LEFT + (W * k) / lines(columns), style: `stroke: ${colour(columns.axes)}; stroke-width: ${lines(columns) > 32 ? 0.5 : 1.5}` }));
      const width = Math.max(W / columns.part[1], 3), height = Math.max(H / rows.part[1], 3);
      picture.append(svg("rect", { class: "held", x: LEFT + Math.min((W * columns.part[0]) / columns.part[1], W - width), y: TOP + Math.min((H * rows.part[0]) / rows.part[1], H - height), width, height }));
      const many = (d) => `${count(d.part[1])} parts${d.part[1] > lines(d) ? `, ${lines(d)} drawn` : ""}`;
      const over = (d) => (d.axes.length ? `over ${d.axes.join("·")}` : "whole");
      picture.append(svg("text", { x: LEFT + W / 2, y: 16, "text-anchor": "middle" }, [columns.name, over(columns), ...(columns.axes.length ? [`(${many(columns)})`] : [])].join(" ")));
      if (rows.name)
        [rows.name, over(rows), ...(rows.axes.length ? [many(rows)] : [])].forEach((text, k) =>
          picture.append(svg("text", { x: LEFT - 8, y: TOP + H / 2 - 8 + 16 * k, "text-anchor": "end" }, text)));
      return picture;
    };
    choose.addEventListener("change", () => { form = 0; draw(); });
    document.addEventListener("click", (event) => {
      const link = event.target.closest("[data-array]");
      if (!link) return;
      choose.value = link.dataset.array;
      form = 0;
      draw();
      document.getElementById("arrays").scrollIntoView();
      choose.focus();
    });
    draw();
  };
  // What scrolls sideways can be scrolled by keyboard; what does not is no stop on the way.
  const scrollable = () => {
    for (const wide of document.querySelectorAll(".wide, figure"))
      if (wide.scrollWidth > wide.clientWidth) wide.setAttribute("tabindex", "0");
      else wide.removeAttribute("tabindex");
  };
  landscape();
  arrays();
  scrollable();
  addEventListener("resize", scrollable);
  document.addEventListener("toggle", scrollable, true);
})();
