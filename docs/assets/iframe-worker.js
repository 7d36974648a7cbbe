// Web workers for pages that are opened from disk. Browsers refuse real ones there, and the search runs in one.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // messages until the script is there
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      this.scope = this.frame.contentWindow
      const page = this.scope.document
      page.open() // or Firefox would replace the page later
      page.write("<!DOCTYPE html><body></body>")
      page.close()
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.src = url
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      }
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `cannot load ${url}` }))
      page.body.appendChild(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
