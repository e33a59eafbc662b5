// The forms of new jobs: documents from files, pasted or the example, errors where they belong.
import {exampleOf, read} from "./api.js";
import {make, tell} from "./dom.js";
import {described, fields, resolved, valueOf} from "./schema.js";

const NAMES = {microbatches: "count", batch: "count", time_limit: "time_limit"};  // fields of plans that are named otherwise

// Its name, and of what it has how many.
function summary(document) {
  const [key, parts] = Object.entries(document ?? {}).find(([, value]) => Array.isArray(value)) ?? [];
  if (Array.isArray(document)) return `${document.length} entries`;
  const told = [document?.name, parts && `${parts.length} ${parts.length === 1 ? key.replace(/(?<!ie)s$/, "") : key}`].filter(Boolean);
  return told.join(" · ") || `${Object.keys(document ?? {}).length} entries`;
}

const isConfig = (document) => Boolean(document?.model_type || document?.architectures) && !document.format;

// What a document is, in words, if it is not one of a format; "" if it may be.
function otherThan(part, format, document) {
  if (part !== "config" && isConfig(document)) return "is a Hugging Face configuration";
  if (!document?.format || document.format === format || (part !== "config" && !format)) return "";
  return `is a ${document.format} document`;
}

let carried = null;  // a document that was dropped where no field takes it, for the form that does

class Form {
  constructor(form, kind, given, homeOf) {
    const formats = Object.fromEntries(given.map((one) => [one.name, one.format]));
    Object.assign(this, {form, kind, formats, homeOf, documents: {}});
    this.alert = form.querySelector("[role=alert]");
    this.home = this.alert.previousElementSibling;
    this.said = form.querySelector("output");
    for (const place of form.querySelectorAll(".drop")) this.listen(place);
    form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    form.elements.validate.addEventListener("click", () => this.validate());
    form.elements.example.addEventListener("click", () => this.example());
  }

  listen(place) {
    const {part} = place.dataset, input = place.querySelector("input");
    const paste = make("textarea", {rows: 4, spellcheck: "false", "aria-label": `${part} as JSON`,
      change: () => paste.value.trim() && this.parse(part, paste.value, "this text")});
    place.append(make("details", {}, make("summary", {}, "or paste JSON"), paste));
    input.addEventListener("change", () => input.files.length && this.take(part, input.files[0]));
    for (const type of ["dragenter", "dragover"])
      place.addEventListener(type, (event) => { event.preventDefault(); place.classList.add("over"); });
    place.addEventListener("dragleave", () => place.classList.remove("over"));
    place.addEventListener("drop", (event) => {
      event.preventDefault();
      place.classList.remove("over");
      if (!event.dataTransfer.files.length) return;
      input.files = event.dataTransfer.files;
      this.take(part, input.files[0]);
    });
  }

  async take(part, file) { this.parse(part, await file.text(), file.name); }

  parse(part, text, name) {
    delete this.documents[part];
    this.form.querySelector(`#${part}-told`).textContent = "";
    try {
      const document = JSON.parse(text), other = otherThan(part, this.formats[part], document);
      if (other) this.refuse(`${part}: ${name} ${other}${this.belongs(part, document)}`, this.opener(document));
      else this.keep(part, document);
    } catch (error) {
      const binary = text.includes("\ufffd");  // what is not UTF-8 is read as this
      this.refuse(`${part}: ${name} is no ${binary ? "text; unpack it if it is compressed" : `JSON: ${error.message}`}`);
    }
  }

  // The field of this form that takes a document.
  own(document) {
    if (isConfig(document)) return "config" in this.formats ? "config" : null;
    return Object.entries(this.formats).find(([, its]) => its && its === document?.format)?.[0] ?? null;
  }

  // Where a document that was refused belongs.
  belongs(part, document) {
    const home = this.own(document), label = home && this.form.querySelector(`label[for=${home}-file]`).textContent;
    const needed = this.formats[part] ?? (part === "config" ? "config.json" : "");
    return `; ${label ? `it belongs under ${label}` : "no field of this job takes it"}${needed && `, here a ${needed} document is needed`}`;
  }

  // A button that opens the form of another kind of job with a document.
  opener(document) {
    const home = !this.own(document) && this.homeOf(document);
    return home && make("button", {type: "button", click: () => open(home, document)}, `Open it under ${home[0]}`);
  }

  keep(part, document) {
    this.documents[part] = document;
    const place = this.form.querySelector(`#${part}-told`);
    place.textContent = summary(document);
    this.refuse("");
    if (part === "config") this.describe(place, document);
  }

  // What the service reads in a configuration: its type, blocks and parameters.
  async describe(place, document) {
    place.textContent = "is being read …";
    try {
      const body = JSON.stringify(document);
      const found = await read("config", {method: "POST", body, headers: {"Content-Type": "application/json"}});
      place.textContent = `${found.model_type}: ${found.layers} blocks, ${found.parameters}`;
    } catch (error) {
      place.textContent = "";
      delete this.documents.config;
      this.refuse(error.message);
    }
  }

  async example() {
    const found = await exampleOf(this.kind);
    for (const place of this.form.querySelectorAll(".drop")) {
      place.querySelector("input").value = place.querySelector("textarea").value = "";
      if (place.dataset.part in found) this.keep(place.dataset.part, found[place.dataset.part]);
    }
    return found;
  }

  // What the service says, at the field that it speaks of.
  refuse(text, more = null) {
    this.said.textContent = "";
    for (const one of this.form.querySelectorAll("[aria-invalid]")) {
      one.removeAttribute("aria-invalid");
      one.removeAttribute("aria-errormessage");
    }
    const name = /^\w+/.exec(text)?.[0] ?? "", field = text && this.field(name);
    if (field) {
      const place = field.closest(".drop");
      if (place) place.append(this.alert); else (field.closest("fieldset, label") ?? field).after(this.alert);
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-errormessage", this.alert.id);
      field.closest("details")?.setAttribute("open", "");
    } else this.home.after(this.alert);
    tell(this.alert, text);
    if (more) this.alert.append(" ", more);
    if (text) (field || this.form.elements.validate).focus();
  }

  field(name) { return this.form.querySelector(`#${name}-file`) ?? this.form.elements[this.names(name)]; }

  names(name) { return name; }

  async send(path) {
    const request = this.request();
    if (!request) return null;
    this.form.setAttribute("aria-busy", "true");
    try {
      const found = await read(path, {method: "POST", body: JSON.stringify(request), headers: {"Content-Type": "application/json"}});
      this.refuse("");
      return found;
    } catch (error) {
      if (error.status === 401) throw error;
      this.refuse(error.message);
      return null;
    } finally {
      this.form.removeAttribute("aria-busy");
    }
  }

  async validate() {
    if (await this.send(`${this.kind}/validate`)) this.said.textContent = "The request is valid.";
  }

  async submit() {
    const job = await this.send(this.kind);
    if (job) location.hash = `#/jobs/${job.id}`;
  }
}

class PlanForm extends Form {
  names(name) { return NAMES[name] ?? name; }

  // The request, or null if something is missing.
  request() {
    for (const part of ["chain", "cluster"])
      if (!(part in this.documents)) {
        this.refuse(`${part}: choose ${part === "chain" ? "a model" : "a cluster"}, or take the example`);
        return null;
      }
    const {elements} = this.form;
    const amount = elements.amount.value, count = elements.count.valueAsNumber, limit = elements.time_limit.valueAsNumber;
    for (const [name, value] of [[amount, count], ["time_limit", limit]])
      if (Number.isNaN(value)) {
        this.refuse(`${name}: a number is needed`);
        return null;
      }
    return {...this.documents, [amount]: count, planner: elements.planner.value, time_limit: limit,
      ...(elements.runtime.value && {runtime: elements.runtime.value})};
  }
}

// A form from the schema of a kind's requests: what the example does not use is folded.
class KindForm extends Form {
  constructor(form, kind, given, homeOf) {
    super(form, kind, given, homeOf);
    this.given = given;
  }

  async example() {
    const found = await super.example();
    for (const {name, type} of this.given)
      if (type !== "document") this.set(this.form.elements[name], found[name]);
    this.refuse("");
  }

  set(node, value) {
    if (node.type === "checkbox") node.checked = value ?? false;
    else node.value = Array.isArray(value) ? value.join(node.type === "textarea" ? "\n" : ", ") : value ?? "";
  }

  request() {
    const found = {...this.documents};
    for (const one of this.given) {
      const node = this.form.elements[one.name], value = one.type === "document" ? undefined : valueOf(one, node);
      if (value !== undefined) found[one.name] = value;
      if (Number.isNaN(value) || (one.required && !(one.name in found))) {
        this.refuse(`${one.name}: ${one.type === "document" ? "a JSON document" : "a value"} is needed, or take the example`);
        return null;
      }
    }
    return found;
  }
}

async function ofSchema(kind, given, homeOf) {
  const example = await exampleOf(kind);
  const form = document.getElementById("kind-form").content.cloneNode(true).firstElementChild;
  const [shown, more] = [true, false].map((used) => given.filter((one) => (one.required || one.name in example) === used));
  const place = (root, of) => {
    for (const {type, node} of of) root.querySelector(type === "document" ? ".parts" : ".fields").append(node);
  };
  const order = [...Object.keys(example)];
  place(form, shown.sort((one, other) => order.indexOf(one.name) - order.indexOf(other.name)));
  place(form.querySelector(".more"), more);
  for (const node of form.querySelectorAll(".parts, .fields"))
    if (!node.firstChild) (node.closest(".options") ?? node).hidden = true;
  form.querySelector(".more").hidden = !more.length;
  return new KindForm(form, kind, given, homeOf);
}

// Open the form of a kind of job with a document in one of its fields, and values in others.
export function open([kind, part], document, values = {}) {
  carried = {part, document, values};
  location.hash = `#/new/${kind}`;
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// A place for any file, which says what it is and opens the form that takes it.
function anyFile(homeOf) {
  const told = make("p", {id: "any-told", class: "told", "aria-live": "polite"},
    "Choose or drop any file here: a model's config.json, a model of layers, a cluster, a graph, jobs, a tuning. The form that takes it opens.");
  const input = make("input", {id: "any-file", type: "file", accept: ".json,application/json", "aria-describedby": "any-told"});
  async function take(file) {
    let document;
    try { document = JSON.parse(await file.text()); } catch (error) { told.textContent = `${file.name} is no JSON: ${error.message}`; return; }
    const home = homeOf(document);
    if (home) open(home, document);
    else told.textContent = `${file.name} ${document?.format ? `is a ${document.format} document` : "says no format"}; no kind of job takes it.`;
  }
  const over = (event) => { event.preventDefault(); place.classList.add("over"); };
  const place = make("section", {class: "drop any", dragenter: over, dragover: over, dragleave: () => place.classList.remove("over"),
    drop: (event) => {
      event.preventDefault();
      place.classList.remove("over");
      if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
    }}, make("h2", {}, make("label", {for: "any-file"}, "What is this file?")), input, told);
  input.addEventListener("change", () => input.files.length && take(input.files[0]));
  return place;
}

export async function showForm(root, kind, signal) {
  const whole = await read("openapi.json", {signal}), {paths} = whole, kinds = Object.keys(paths)
    .map((path) => /^\/v1\/([\w-]+)$/.exec(path)?.[1]).filter((one) => one && `/v1/${one}/validate` in paths);
  if (!kinds.includes(kind)) throw new Error(`There is no kind of job named ${kind}.`);
  const about = (one) => {
    const {summary: title, requestBody} = paths[`/v1/${one}`].post, {schema} = requestBody.content["application/json"];
    return {title, schema: resolved(schema.anyOf?.[0] ?? schema, {}, whole)};
  };
  const takes = (one, document) => fields(about(one).schema, whole)
    .find(({name, format}) => isConfig(document) ? name === "config" : format && format === document?.format)?.name;
  const homeOf = (document) => [kind, ...kinds].map((one) => [one, takes(one, document)]).find(([, part]) => part);
  const choose = make("select", {change: () => { location.hash = `#/new/${choose.value}`; }},
    ...kinds.map((one) => make("option", {value: one, selected: one === kind}, `${one}: ${about(one).title.replace(/\.$/, "")}`)));
  const given = fields(about(kind).schema, whole);
  const form = kind === "plan" ? new PlanForm(document.getElementById("form").content.cloneNode(true).firstElementChild, kind, given, homeOf)
    : await ofSchema(kind, given, homeOf);
  if (signal.aborted) return;
  root.replaceChildren(make("h1", {tabindex: "-1"}, "New job"),
    make("p", {class: "kind"}, make("label", {}, "Kind ", choose)),
    make("p", {class: "sub"}, ...(kind === "plan" ? ["A model's profile and a cluster become a plan of stages, with a bound on every other. "
      + "Of a transformer, train-plan searches tensor, data, context and expert degrees too."]
      : described(about(kind).schema.description)),
    " After Submit the job's page opens: a process starts in a second or two, the first search on a machine compiles its kernels "
      + "for up to half a minute, and answers are shown as they are found."), anyFile(homeOf), form.form);
  if (carried && carried.part in form.formats) {
    form.keep(carried.part, carried.document);
    for (const [name, value] of Object.entries(carried.values)) form.form.elements[name].value = value;
  }
  carried = null;
}
