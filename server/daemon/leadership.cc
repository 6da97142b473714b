#include "server/daemon/leadership.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "server/store/etcd/etcd_journal.h"

namespace weightwire::daemon {
namespace {

Status StandsBy(const std::string& what) {
  return Status(Code::kUnavailable, Reason::kNotReady, "coordinator: standby, " + what);
}

}  // namespace

Status Leadership::CheckFiles(const Config& config) {
  for (const std::string& file :
       {config.etcd_ca, config.etcd_cert, config.etcd_key, config.etcd_password_file}) {
    if (file.empty() || access(file.c_str(), R_OK) == 0) continue;
    return Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                  file + " cannot be read: " + std::strerror(errno));
  }
  return OkStatus();
}

Leadership::Leadership(const Config& config, boost::asio::io_context& io, metrics::Sink& metrics)
    : io_(io),
      metrics_(metrics),
      prefix_("weightwire/" + config.job + "/"),
      standing_(StandsBy("asks etcd who leads")),
      client_({config.etcd,
               {config.etcd_cert, config.etcd_key, config.etcd_ca, config.etcd_server_name, ""},
               config.etcd_user,
               config.etcd_password_file}) {
  election_.emplace(client_, Candidate(config), Events());
}

store::Election::Options Leadership::Candidate(const Config& config) const {
  return {prefix_ + "leader", config.name + " (" + config.listen + ")"};
}

// On the election's thread.
store::Election::Events Leadership::Events() {
  store::Election::Events events;
  events.stands_by = [this](const std::string& leader) {
    spdlog::info("standby: {} leads", leader);
    boost::asio::post(io_, [this, leader] { Stands(StandsBy(leader + " leads")); });
  };
  events.hindered = [this](Status why) {
    boost::asio::post(io_, [this, why = std::move(why)] {
      if (standing_ != why) spdlog::warn("no leader can be found: {}", why.ToString());
      Stands(why);
    });
  };
  events.refused = [this](Status why) {
    boost::asio::post(io_, [this, why = std::move(why)] {
      refused_ = why;
      io_.stop();
    });
  };
  events.won = [this](store::Term term) {
    boost::asio::post(io_, [this, term = std::move(term)]() mutable {
      spdlog::info("leads: {} of revision {}", term.key, term.revision);
      term_ = std::move(term);
      Stands(OkStatus());
      io_.stop();
    });
  };
  events.lost = [](const Status& why) {
    spdlog::critical("this coordinator does not lead any more and ends: {}", why.ToString());
    spdlog::shutdown();
    std::_Exit(ExitCodeOf(why));
  };
  return events;
}

void Leadership::Stands(Status standing) {
  standing_ = std::move(standing);
  metrics_.Set("leader", standing_.ok() ? 1 : 0);
}

Result<bool> Leadership::Await() {
  io_.run();
  io_.restart();
  if (!refused_.ok()) return Fail(refused_);
  return term_.has_value();
}

std::unique_ptr<coordinator::Journal> Leadership::OpenJournal(Executor& strand,
                                                              metrics::Sink& metrics) {
  return std::make_unique<store::EtcdJournal>(prefix_, *term_, client_, strand, metrics);
}

}  // namespace weightwire::daemon
