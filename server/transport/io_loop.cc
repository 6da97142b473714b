#include "server/transport/io_loop.h"

#include <pthread.h>
#include <signal.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <mutex>
#include <thread>
#include <utility>

#include "server/base/status.h"
#include "server/base/thread_executor.h"

namespace weightwire::transport {

struct IoLoop::Impl {
  // Not with a concurrency hint of 1: then tasks posted from the loop's own thread wait in a queue
  // of their own and can be overtaken by tasks that other threads post later.
  boost::asio::io_context context;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work =
      boost::asio::make_work_guard(context);
  std::mutex mutex;
  size_t posted = 0;  ///< and not yet run; guarded by mutex
  bool stopped = false;
  std::thread thread;

  void RunTask(Task& task) {
    task();
    task = nullptr;
    std::lock_guard lock(mutex);
    --posted;
  }

  /// A task may be posted just when the context runs dry: only an empty count ends the loop.
  void Run() {
    StrandHelper helper;
    for (;;) {
      while (context.run_one() > 0) helper.Run();
      std::lock_guard lock(mutex);
      if (posted == 0) {
        stopped = true;
        return;
      }
      context.restart();
    }
  }
};

IoLoop::IoLoop(const std::string& name) : impl_(std::make_unique<Impl>()) {
  impl_->thread = std::thread([impl = impl_.get()] {
    sigset_t broken_pipe;  // OpenSSL writes to sockets without MSG_NOSIGNAL
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
    impl->Run();
  });
  pthread_setname_np(impl_->thread.native_handle(), name.substr(0, 15).c_str());
}

IoLoop::~IoLoop() { Stop(); }

boost::asio::io_context& IoLoop::context() { return impl_->context; }

void IoLoop::Post(Task task) {
  {
    std::lock_guard lock(impl_->mutex);
    if (!impl_->stopped) {
      ++impl_->posted;
      boost::asio::post(impl_->context, [impl = impl_.get(), task = std::move(task)]() mutable {
        impl->RunTask(task);
      });
      return;
    }
  }
  task();
}

void IoLoop::Stop() {
  if (!impl_->thread.joinable()) return;
  WW_CHECK(impl_->thread.get_id() != std::this_thread::get_id());
  impl_->work.reset();
  impl_->thread.join();
}

}  // namespace weightwire::transport
