// Two pens with the same strokes: one draws on a canvas, one writes SVG. What is exported is what is shown.

export const FONT = "system-ui, sans-serif";

/** A pen for a 2D context whose unit is the CSS pixel. */
export function canvasPen(context) {
  return {
    rect(x, y, width, height, fill, alpha = 1) {
      context.globalAlpha = alpha;
      context.fillStyle = fill;
      context.fillRect(x, y, width, height);
    },
    frame(x, y, width, height, stroke, thickness) {
      context.globalAlpha = 1;
      context.strokeStyle = stroke;
      context.lineWidth = thickness;
      context.strokeRect(x, y, width, height);
    },
    line(x1, y1, x2, y2, stroke, thickness, alpha = 1) {
      context.globalAlpha = alpha;
      context.strokeStyle = stroke;
      context.lineWidth = thickness;
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
    },
    text(x, y, text, fill, size, anchor = "middle", alpha = 1) {
      context.globalAlpha = alpha;
      context.fillStyle = fill;
      context.font = `${size}px ${FONT}`;
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.textBaseline = "middle";
      context.fillText(text, x, y);
    },
  };
}

export const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const short = (number) => Number(number.toFixed(2));

/** A pen that collects SVG elements; `toString` is the document. */
export function svgPen(width, height) {
  const parts = [];
  return {
    rect(x, y, w, h, fill, alpha = 1) {
      parts.push(
        `<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" fill="${fill}" opacity="${alpha}"/>`,
      );
    },
    frame(x, y, w, h, stroke, thickness) {
      const box = `x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}"`;
      parts.push(`<rect ${box} fill="none" stroke="${stroke}" stroke-width="${thickness}"/>`);
    },
    line(x1, y1, x2, y2, stroke, thickness, alpha = 1) {
      const ends = `x1="${short(x1)}" y1="${short(y1)}" x2="${short(x2)}" y2="${short(y2)}"`;
      parts.push(`<line ${ends} stroke="${stroke}" stroke-width="${thickness}" opacity="${alpha}"/>`);
    },
    text(x, y, text, fill, size, anchor = "middle", alpha = 1) {
      const place = `x="${short(x)}" y="${short(y)}" text-anchor="${anchor}" dominant-baseline="central"`;
      parts.push(`<text ${place} fill="${fill}" font-size="${size}" opacity="${alpha}">${escaped(text)}</text>`);
    },
    toString() {
      const box = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
      return `<svg xmlns="http://www.w3.org/2000/svg" ${box} font-family="${FONT}">${parts.join("")}</svg>`;
    },
  };
}

/** The same pen, moved down by `dy`: for several timelines in one picture. */
export function lowered(pen, dy) {
  return {
    rect: (x, y, ...rest) => pen.rect(x, y + dy, ...rest),
    frame: (x, y, ...rest) => pen.frame(x, y + dy, ...rest),
    line: (x1, y1, x2, y2, ...rest) => pen.line(x1, y1 + dy, x2, y2 + dy, ...rest),
    text: (x, y, ...rest) => pen.text(x, y + dy, ...rest),
  };
}
