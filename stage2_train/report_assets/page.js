(() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();

  function models(root) {
    return root.references ? [...root.references()] : [];
  }

  function paint() {
    const ink = dark.matches ? "#e6e9ed" : "#1b1f24";
    const line = dark.matches ? "#353c44" : "#d5dae0";
    const ground = dark.matches ? "#14171b" : "#ffffff";
    const set = (model, values) => {
      for (const [key, value] of Object.entries(values)) if (key in model) model[key] = value;
    };
    for (const { root } of views.values()) {
      for (const model of models(root)) {
        if (model.type === "Figure") set(model, { background_fill_color: ground,
          border_fill_color: ground, outline_line_color: line });
        else if (/Axis$/.test(model.type)) set(model, { axis_label_text_color: ink,
          major_label_text_color: ink, axis_line_color: line, major_tick_line_color: line,
          minor_tick_line_color: null });
        else if (model.type === "Grid") set(model, { grid_line_color: line });
        else if (model.type === "ColorBar") set(model, { background_fill_color: ground,
          major_label_text_color: ink, title_text_color: ink });
        else if (model.type === "Span") set(model, { line_color: ink });
      }
    }
  }

  function keys(place, root) {
    const figures = models(root).filter((model) => model.type === "Figure");
    const home = figures.map((figure) => ["x_range", "y_range"].map((axis) =>
      [figure[axis].start, figure[axis].end]));
    const move = (shift, factor) => figures.forEach((figure) => {
      ["x_range", "y_range"].forEach((axis, index) => {
        const range = figure[axis];
        if (typeof range.start !== "number") return;
        const width = range.end - range.start;
        const middle = (range.start + range.end) / 2 + shift[index] * width * 0.1;
        range.setv({ start: middle - width * factor / 2, end: middle + width * factor / 2 });
      });
    });
    place.addEventListener("keydown", (event) => {
      const actions = {
        ArrowLeft: () => move([-1, 0], 1), ArrowRight: () => move([1, 0], 1),
        ArrowUp: () => move([0, 1], 1), ArrowDown: () => move([0, -1], 1),
        "+": () => move([0, 0], 0.8), "=": () => move([0, 0], 0.8), "-": () => move([0, 0], 1.25),
        0: () => figures.forEach((figure, which) => ["x_range", "y_range"].forEach((axis, i) => {
          const [start, end] = home[which][i];
          if (typeof start === "number") figure[axis].setv({ start, end });
        })),
      };
      if (actions[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        actions[event.key]();
        event.preventDefault();
      }
    });
  }

  function sorting(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value;
      const number = (text) => text === "" ? NaN : Number(text);
      const rows = [...table.tBodies[0].rows];
      rows.sort((one, two) => {
        const [a, b] = [value(one), value(two)], [x, y] = [number(a), number(b)];
        if (a === "" || b === "") return (a === "") - (b === "");
        const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  async function start() {
    if (window.Bokeh) Bokeh.logger.set_level("warn");
    document.querySelectorAll("table").forEach(sorting);
    const items = JSON.parse(document.getElementById("plots").textContent);
    for (const [name, item] of Object.entries(items)) {
      const place = document.getElementById(`plot-${name}`);
      const manager = await Bokeh.embed.embed_item(item, place.id);
      const root = manager.roots ? [...manager.roots][0].model : [...manager][0].model;
      views.set(name, { root });
      keys(place, root);
    }
    paint();
    dark.addEventListener("change", paint);
    document.querySelectorAll("input[data-arm]").forEach((box) =>
      box.addEventListener("change", () => {
        for (const { root } of views.values())
          for (const model of models(root))
            if (model.tags && model.tags.includes(`arm-${box.dataset.arm}`))
              model.visible = box.checked;
      }));
    document.documentElement.dataset.ready = "yes";
  }
  start().catch((error) => { document.documentElement.dataset.ready = "failed"; throw error; });
})();
