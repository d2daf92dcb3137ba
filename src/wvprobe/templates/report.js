"use strict";
(() => {
  const held = JSON.parse(document.getElementById("held").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touched = matchMedia("(pointer: coarse)");
  const settings = { displaylogo: false, responsive: true, displayModeBar: touched.matches ? false : "hover" };
  const shownRows = 200;
  const printWidth = 680;
  const narrow = 600;
  const below = { orientation: "h", y: -0.25 };
  let printing = false;

  // A figure's own colours are those of a light ground; templates and these swaps make it dark.
  function coloured(value, swaps) {
    if (typeof value === "string") return swaps[value] ?? value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, swaps));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, swaps)]));
  }

  function draw(plot) {
    const night = dark.matches && !printing;
    const { data, layout } = coloured(held.figures[plot.dataset.figure], night ? held.themes.swaps : {});
    layout.template = held.themes[night ? "dark" : "light"];
    // A finger that drags moves the page, not the axes.
    if (touched.matches) layout.dragmode = false;
    if (printing) layout.width = printWidth;
    // Where there is no room beside a plot, its legend goes below.
    else if (plot.clientWidth < narrow && layout.legend?.orientation !== "h") layout.legend = below;
    plot.dataset.drawn = "";
    return Plotly.react(plot, data, layout, settings);
  }

  const plots = [...document.querySelectorAll("[data-figure]")];
  const redraw = () => plots.filter((plot) => "drawn" in plot.dataset).forEach(draw);
  const nearby = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      nearby.unobserve(target);
      draw(target).then(() => reach(target.parentElement));
    }
  }, { rootMargin: "800px" });
  plots.forEach((plot) => nearby.observe(plot));
  dark.addEventListener("change", redraw);

  // What is wider than the page scrolls by itself, and then by keyboard too.
  function reach(box) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  const boxes = [...document.querySelectorAll(".wide")];
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => reach(target)));
  boxes.forEach((box) => sizes.observe(box));

  const written = (cell) =>
    cell === null ? "" : typeof cell !== "number" || Number.isInteger(cell) ? String(cell) : String(Number(cell.toPrecision(4)));

  function element(name, text, scope) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (scope) made.scope = scope;
    return made;
  }

  function fill(details) {
    const box = details.querySelector(".wide");
    if (box.firstChild) return;
    const { columns, rows } = held.tables[details.dataset.table];
    const table = element("table");
    const more = rows.length > shownRows ? `, the first ${shownRows} rows; CSV and JSON have all` : "";
    table.append(element("caption", `${columns.length} columns${more}`));
    const head = element("tr");
    columns.forEach((column) => head.append(element("th", column, "col")));
    table.append(element("thead"));
    table.tHead.append(head);
    const body = element("tbody");
    for (const row of rows.slice(0, shownRows)) {
      const line = element("tr");
      row.forEach((cell) => line.append(element("td", written(cell))));
      body.append(line);
    }
    table.append(body);
    box.append(table);
    reach(box);
  }
  document.querySelectorAll("[data-table]").forEach((details) => {
    details.addEventListener("toggle", () => details.open && fill(details));
  });

  // Numbers of all claims, a row a number.
  function claims() {
    const rows = held.results.claims.flatMap((claim) => {
      const [low, high] = claim.interval ?? [null, null];
      const numbers = Object.entries(claim.numbers);
      const named = numbers.length ? numbers : [[null, null]];
      return named.map(([name, value]) => [claim.id, claim.model, claim.verdict, name, value, low, high, claim.n]);
    });
    return { columns: ["id", "model", "verdict", "number", "value", "low", "high", "n"], rows };
  }

  const field = (cell) => {
    const text = cell === null ? "" : typeof cell === "boolean" ? (cell ? "True" : "False") : String(cell);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(field).join(",") + "\n").join("");
  const records = ({ columns, rows }) => rows.map((row) => Object.fromEntries(row.map((cell, i) => [columns[i], cell])));

  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  document.querySelectorAll("[data-save]").forEach((button) => {
    button.addEventListener("click", () => {
      const of = button.dataset.of;
      const whole = of === "results";
      if (button.dataset.save === "csv") save(`wvprobe-${of}.csv`, csv(whole ? claims() : held.tables[of]), "text/csv");
      else save(`wvprobe-${of}.json`, JSON.stringify(whole ? held.results : records(held.tables[of]), null, 1), "application/json");
    });
  });

  // On paper everything is open, and on white.
  let closed = [];
  addEventListener("beforeprint", () => {
    printing = true;
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => {
      details.open = true;
      if (details.dataset.table) fill(details);
    });
    plots.forEach((plot) => nearby.unobserve(plot));
    plots.forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    closed.forEach((details) => { details.open = false; });
    redraw();
  });
})();
