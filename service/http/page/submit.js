// The form of a new plan: its documents from files or the example, its errors where they belong.
import {read} from "./api.js";
import {tell} from "./dom.js";

const NAMES = {microbatches: "count", batch: "count", planner: "planner", time_limit: "time_limit", runtime: "runtime"};

function summary(part, document) {
  const parts = part === "chain" ? document.layers : document.devices;
  const count = Array.isArray(parts) ? ` · ${parts.length} ${part === "chain" ? "layers" : "devices"}` : "";
  return `${document.name ?? "without a name"}${count}`;
}

class Form {
  constructor(root) {
    const template = document.getElementById("form").content.cloneNode(true);
    root.replaceChildren(template);
    this.form = root.querySelector("form");
    this.alert = this.form.querySelector("[role=alert]");
    this.said = this.form.querySelector("output");
    this.documents = {};
    for (const place of this.form.querySelectorAll(".drop")) this.listen(place);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.form.elements.validate.addEventListener("click", () => this.validate());
    this.form.elements.example.addEventListener("click", () => this.example());
  }

  listen(place) {
    const {part} = place.dataset, input = place.querySelector("input");
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

  async take(part, file) {
    delete this.documents[part];
    try {
      this.keep(part, JSON.parse(await file.text()));
    } catch (error) {
      this.refuse(`${part}: ${file.name} is no JSON: ${error.message}`);
    }
  }

  keep(part, document) {
    this.documents[part] = document;
    this.form.querySelector(`#${part}-told`).textContent = summary(part, document ?? {});
    this.refuse("");
  }

  async example() {
    const found = await (await fetch("page/example.json")).json();
    for (const part of ["chain", "cluster"]) {
      this.form.querySelector(`#${part}-file`).value = "";
      this.keep(part, found[part]);
    }
  }

  // What the service says, and the field that it speaks of.
  refuse(text) {
    tell(this.alert, text);
    this.said.textContent = "";
    for (const one of this.form.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
    if (!text) return;
    const name = /^\w+/.exec(text)?.[0] ?? "";
    const field = this.form.querySelector(`#${name}-file`) ?? this.form.elements[NAMES[name]];
    field?.setAttribute("aria-invalid", "true");
    (field ?? this.form.elements.validate).focus();
  }

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
    if (await this.send("plan/validate")) this.said.textContent = "The request is valid.";
  }

  async submit() {
    const job = await this.send("plan");
    if (job) location.hash = `#/jobs/${job.id}`;
  }
}

export async function showForm(root) { new Form(root); }
