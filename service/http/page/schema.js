// Fields of a form from the JSON schema of a request: one for each property.
import {make} from "./dom.js";

const SCALARS = new Set(["integer", "number", "string"]);

// The first paragraph of a description, whose code is between double backticks.
export function described(text = "") {
  return text.split(/\n\n/)[0].replaceAll("\n", " ").split("``")
    .map((part, i) => i % 2 ? make("code", {}, part) : part);
}

function typeOf(schema) {
  if (schema.enum) return "choice";
  if (schema.items?.anyOf?.[0].type === "string") return "lines";
  if (schema.type === "array") return SCALARS.has(schema.items?.type) ? "list" : "document";
  return SCALARS.has(schema.type) || schema.type === "boolean" ? schema.type : "document";
}

const words = (name) => name.replaceAll("_", " ");
const told = (value) => Array.isArray(value) ? value.join(", ") : `${value ?? ""}`;

// A description's first sentence, with fields in place of options of the command line.
const first = (text = "") => text.replaceAll("\n", " ").split(/(?<=\.) (?=[A-Z])/)[0].replace(/--([a-z-]+)/g, (_, one) => one.replaceAll("-", " "));

function drop(name, required, description) {
  return make("section", {class: "drop", "data-part": name},
    make("h2", {}, make("label", {for: `${name}-file`}, words(name))),
    make("input", {id: `${name}-file`, type: "file", accept: ".json,application/json", "aria-describedby": `${name}-told`}),
    make("p", {id: `${name}-told`, class: "told"}, first(description) || `Choose or drop a JSON file${required ? "" : "; not needed"}.`));
}

function input(name, type, schema, initial, examples) {
  if (examples) return make("select", {name}, make("option", {value: ""}, "not said"), ...examples.map((one) => make("option", {}, one)));
  if (type === "boolean" && initial === false) return make("input", {name, type: "checkbox"});
  if (type === "choice" || type === "boolean") {
    const choices = schema.enum ?? ["true", "false"];
    return make("select", {name}, ...(initial === null ? [make("option", {value: ""}, "as it is best")] : []),
      ...choices.map((one) => make("option", {selected: one === initial}, one)));
  }
  if (type === "lines") return make("textarea", {name, rows: 5, autocomplete: "off", spellcheck: "false"});
  const given = told(initial);
  if (type === "list")
    return make("input", {name, placeholder: given || "values, with commas between", autocomplete: "off", spellcheck: "false"});
  if (type === "string") return make("input", {name, placeholder: given, autocomplete: "off", spellcheck: "false"});
  return make("input", {name, type: "number", step: type === "integer" ? 1 : "any", placeholder: given});
}

// What a schema refers to, in its own definitions or in the root's.
export function resolved(one, schema, root) {
  const parts = one.$ref?.split("/").slice(1);
  return parts ? parts.reduce((node, part) => node[part], parts[0] === "components" ? root : schema) : one;
}

// What documents of a shape name as their format, also where an upload may stand for them.
function formatOf(shape, schema, root) {
  const document = resolved(shape.anyOf?.[0] ?? shape, schema, root);
  return document.properties?.format?.const;
}

// Every property: its name, type, format (of a document that has one), whether it is required, and its node.
export function fields(schema, root) {
  const shapeOf = (one) => resolved((one.anyOf ?? one.oneOf)?.find((other) => other.type !== "null") ?? one, schema, root);
  const required = new Set(schema.required);
  const found = Object.entries(schema.properties).map(([name, property]) => {
    const shape = shapeOf(property), type = typeOf(shape);
    const needed = required.has(name), initial = property.default;
    const node = type === "document" ? drop(name, needed, property.description)
      : make("label", {class: type === "boolean" && initial === false ? "check" : null}, words(name),
        ...(type === "lines" ? [make("span", {class: "told"}, first(property.description))] : []), input(name, type, shape, initial, property.examples));
    return {name, type, format: formatOf(shape, schema, root), items: shape.items?.type, required: needed, node};
  });
  return found.sort((one, other) => other.required - one.required);
}

const ofText = (text, type) => type === "string" ? text : text === "" ? NaN : Number(text);

// What a field holds; nothing if it is left as it is.
export function valueOf({type, items}, node) {
  if (node.type === "checkbox") return node.checked || undefined;
  const text = node.value.trim();
  if (node.validity?.badInput) return NaN;
  if (!text) return undefined;
  if (type === "boolean") return text === "true";
  if (type === "lines") return text.split("\n").map((one) => one.trim()).filter((one) => one && !one.endsWith(":"));  // of which nothing is said yet
  if (type === "list") {
    const values = text.split(",").map((one) => ofText(one.trim(), items));
    return values.some(Number.isNaN) ? NaN : values;
  }
  return type === "integer" || type === "number" ? Number(text) : text;
}
