#include "server/rpc/server.h"

#include <mutex>
#include <utility>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

namespace weightwire::rpc {
namespace {

using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

constexpr int kConcurrentStreamsMax = 1'024;  // of one connection

void SetLimits(grpc::ServerBuilder& builder, size_t message_bytes_max) {
  // Twice the limit, so that a message somewhat over it reaches the service and is refused in our
  // words, with the limit and a remedy; what is larger gRPC refuses unread.
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::min<size_t>(2 * message_bytes_max, 1u << 30)));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kConcurrentStreamsMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 2'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 600'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
}

class ServerImpl final : public GrpcServer {
 public:
  ServerImpl(std::unique_ptr<grpc::Server> server, std::unique_ptr<Acceptor> acceptor)
      : server_(std::move(server)), acceptor_(std::move(acceptor)) {}
  ~ServerImpl() override { Shutdown(Nanos(0)); }

  void HandOver(memory::UniqueFd connection) override {
    std::lock_guard lock(mutex_);
    if (!acceptor_) return;
    Acceptor::NewConnectionParameters parameters;
    parameters.fd = connection.Release();
    acceptor_->HandleNewConnection(&parameters);
  }

  void SetServing(const std::string& service, bool serving) override {
    if (auto* health = server_->GetHealthCheckService()) {
      health->SetServingStatus(service, serving);
      health->SetServingStatus("", serving);
    }
  }

  void Shutdown(Nanos grace) override {
    {
      std::lock_guard lock(mutex_);
      if (!acceptor_) return;
      acceptor_.reset();
    }
    server_->Shutdown(std::chrono::system_clock::now() + grace);
    server_->Wait();
  }

 private:
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace

Result<std::unique_ptr<GrpcServer>> GrpcServer::Start(Options options,
                                                      std::vector<grpc::Service*> services) {
  static std::once_flag plugins;
  std::call_once(plugins, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
  grpc::ServerBuilder builder;
  SetLimits(builder, options.message_bytes_max);
  for (grpc::Service* service : services) builder.RegisterService(service);
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      options.credentials ? options.credentials : grpc::InsecureServerCredentials());
  auto server = builder.BuildAndStart();
  if (!server) return Fail(Code::kInternal, Reason::kInternal, "gRPC refused to start a server");
  return std::make_unique<ServerImpl>(std::move(server), std::move(acceptor));
}

}  // namespace weightwire::rpc
