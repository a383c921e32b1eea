"use strict";
// Draws the charts of the group that is chosen, anew when the reader's colours or the width of the page change.
(() => {
  const { groups } = JSON.parse(document.getElementById("data").textContent);
  const choice = document.getElementById("group");
  const grid = document.querySelector("#charts .grid");
  const remarks = document.querySelector("#charts .remarks");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];

  const narrow = 520; // pixels of a chart in which names and legends leave little room
  const narrowest = 400; // a second column of a legend would be cut off
  const config = (width) => {
    const [ink, dim, line, accent] = dark.matches
      ? ["#e4e7ea", "#9aa3ad", "#2b3137", "#8ab6dc"]
      : ["#1f2328", "#5f6770", "#e8ebee", "#4c78a8"];
    return {
      background: "transparent",
      font: "system-ui, sans-serif",
      view: { stroke: null },
      axis: { labelColor: dim, titleColor: dim, titleFontWeight: 400, gridColor: line, domainColor: line,
        tickColor: line, labelFontSize: 12, titleFontSize: 12, titlePadding: 8, tickCount: 6 },
      legend: { labelColor: dim, labelFontSize: 12, symbolSize: 90, columnPadding: 16,
        ...(width < narrow ? { columns: width < narrowest ? 1 : 2 } : {}) },
      range: { category: ["#5b7fa6", "#dfa551", "#cf6a63", "#67a58a", "#8f78ad", "#9a9a9a", "#b07aa1", "#9c755f"] },
      params: Object.entries({ ink, dim, accent, label_limit: Math.min(420, 0.42 * width) })
        .map(([name, value]) => ({ name, value })),
    };
  };

  const figure = (picture) => {
    const element = document.createElement("figure");
    element.classList.toggle("wide", picture.wide);
    const caption = document.createElement("figcaption");
    const [title, about, chart] = ["h3", "p", "div"].map((name) => document.createElement(name));
    title.textContent = picture.title;
    about.textContent = picture.about;
    chart.className = "chart";
    caption.append(title, about);
    element.append(caption, chart);
    return element;
  };

  const draw = async () => {
    drawn.forEach((result) => result.finalize());
    const group = groups[Number(choice.value)];
    const figures = group.pictures.map(figure);
    grid.replaceChildren(...figures);
    remarks.replaceChildren(...group.remarks.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
    const options = { actions: false, ast: true, renderer: "svg", tooltip: { theme: dark.matches ? "dark" : "light" } };
    drawn = await Promise.all(group.pictures.map((picture, place) => {
      const chart = figures[place].lastChild;
      return vegaEmbed(chart, picture.spec, { ...options, config: config(chart.clientWidth) });
    }));
    document.body.dataset.drawn = choice.value;
  };

  groups.forEach((group, place) => choice.add(new Option(group.name, String(place))));
  choice.closest(".tools").hidden = groups.length < 2;
  choice.addEventListener("change", draw);
  for (const query of [dark, ...[900, 500].map((width) => window.matchMedia(`(max-width: ${width}px)`))]) {
    query.addEventListener("change", draw);
  }
  draw();
})();
