#include "server/daemon/http_pages.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "server/daemon/status_documents.h"
#include "server/daemon/tls_setup.h"
#include "server/metrics/process.h"

namespace weightwire::daemon {
namespace {

using Windows = std::shared_ptr<const std::vector<Window>>;

void SetProcessGauges(metrics::Sink& metrics) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  metrics.Set("open_fds", std::max(0, metrics::OpenDescriptors()));
  metrics.Set("max_fds", static_cast<double>(limit.rlim_cur));
}

/// Asks each window in turn, on its strand; `done` gets the answers.
template <typename Answer>
void AskAll(Windows windows, std::function<Answer()> Window::*what,
            std::function<void(std::vector<Answer>)> done, std::vector<Answer> answers = {}) {
  if (answers.size() == windows->size()) return done(std::move(answers));
  const Window& window = (*windows)[answers.size()];
  window.strand->Post(
      [windows, what, done = std::move(done), answers = std::move(answers), &window]() mutable {
        answers.push_back((window.*what)());
        AskAll(std::move(windows), what, std::move(done), std::move(answers));
      });
}

HttpReply NotNow(const Status& why) { return {.status = 503, .body = why.ToString() + "\n"}; }

HttpPage ReadyPage(const PageSources& from) {
  return [windows = from.windows, standing = from.standing](HttpRespond respond) {
    AskAll<Status>(windows, &Window::ready, [=](std::vector<Status> answers) {
      if (windows->empty()) answers.push_back(standing());
      HttpReply reply{.body = "ready\n"};
      for (const Status& status : answers) {
        if (!status.ok()) reply = NotNow(status);
      }
      respond(std::move(reply));
    });
  };
}

HttpPage TextPage(const PageSources& from) {
  return [windows = from.windows, standing = from.standing](HttpRespond respond) {
    AskAll<std::string>(windows, &Window::page, [=](std::vector<std::string> texts) {
      if (windows->empty()) return respond(NotNow(standing()));
      HttpReply reply;
      for (const std::string& text : texts) reply.body += text + "\n";
      respond(std::move(reply));
    });
  };
}

/// The coordinator's strand collects and a worker writes, so that no reader keeps a strand or the
/// io_context busy.
HttpPage DocumentPage(const PageSources& from, const std::string& path) {
  return [windows = from.windows, standing = from.standing, &workers = from.workers,
          path](HttpRespond respond) {
    for (const Window& window : *windows) {
      const auto document = window.documents.find(path);
      if (document == window.documents.end()) continue;
      return window.strand->Post([&collect = document->second, &workers, respond] {
        workers.Post([write = collect(), respond] { respond(write()); });
      });
    }
    respond(NotNow(standing()));
  };
}

}  // namespace

std::map<std::string, HttpPage> Pages(const PageSources& sources) {
  std::map<std::string, HttpPage> pages;
  pages["/metrics"] = [windows = sources.windows, &sink = sources.sink,
                       &config = sources.config](HttpRespond respond) {
    AskAll<SetGauges>(windows, &Window::measure,
                      [&sink, &config, respond](std::vector<SetGauges> roles) {
                        for (const SetGauges& set : roles) set(sink);
                        SetProcessGauges(sink);
                        SetExpiryGauge(config, sink);
                        respond({200, "text/plain; version=0.0.4; charset=utf-8", sink.Text()});
                      });
  };
  // Alive: every strand still takes its turn.
  pages["/healthz"] = [windows = sources.windows](HttpRespond respond) {
    AskAll<Status>(windows, &Window::ready,
                   [respond](std::vector<Status>) { respond({.body = "alive\n"}); });
  };
  pages["/readyz"] = ReadyPage(sources);
  pages["/status"] = TextPage(sources);
  if (!sources.coordinates) {
    pages["/"] = pages["/status"];
    return pages;
  }
  pages["/"] = [](HttpRespond respond) { respond(StatusPage()); };
  for (const char* path : {kStatusDocument, kPageDocument, kPlansDocument, kLinksDocument}) {
    pages[path] = DocumentPage(sources, path);
  }
  return pages;
}

}  // namespace weightwire::daemon
