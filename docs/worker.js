// Search runs in a worker, which browsers refuse to a page that was opened from a folder. There a
// hidden frame takes its place: it runs the same script, and messages are events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.window = frame.contentWindow
      this.window.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(resolve => {
        const script = frame.contentDocument.createElement("script")
        script.src = new URL(url, location)
        script.onload = resolve
        frame.contentDocument.body.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.window.frameElement.remove()
    }
  }
}
