#include "tests/integration/bad_input.h"

namespace weightwire::integration {
namespace {

class BadCall : public BadInput {
 protected:
  static client::Layout Good() {
    return SchemeLayout(TinyQwen2(), HuggingFaceWhole(), oracle::HuggingFace(TinyQwen2(), 0));
  }
  /// A bound publisher that is the whole trainer.
  std::unique_ptr<client::Publisher> BoundPublisher() {
    auto publisher = OpenPublisher();
    const Status bound = publisher->Bind(Good());
    EXPECT_TRUE(bound.ok()) << bound.ToString();
    return publisher;
  }
  Status Refused(const v1::AttachUp& up) {
    RawAttachment attachment(daemon_, up);
    auto attached = attachment.Attached();
    EXPECT_FALSE(attached.has_value());
    return attached ? OkStatus() : attached.error();
  }
  template <typename Stub, typename Request, typename Response>
  static Status Call(Stub& stub,
                     grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                     const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    Response response;
    return FromGrpc((stub.*method)(&context, request, &response));
  }
  void Evict(const std::string& group) {
    v1::EvictRequest request;
    request.set_group(group);
    request.set_why("a test");
    auto stub = daemon_.Coordinator();
    const Status status = Call(*stub, &v1::Coordinator::Stub::Evict, request);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
};

// ---- who takes part

TEST_F(BadCall, DuplicateRankIsRefusedAndTheFirstOneGoesOn) {
  auto first = BoundPublisher();
  const auto second = client::Publisher::Open(Place("trainer"));
  ASSERT_FALSE(second.has_value());
  ExpectRefused(second.error(), {Code::kAlreadyExists, Reason::kDuplicateRank, "trainer/0", ""});
  const Status accepted = first->Publish(Version(5));
  EXPECT_TRUE(accepted.ok()) << accepted.ToString();
}

TEST_F(BadCall, AVersionAfterWhichNoOtherCouldFollowIsRefusedWithTheBound) {
  auto publisher = BoundPublisher();
  const Status refused = publisher->Publish(Version(UINT64_MAX));
  ExpectRefused(refused, {Code::kInvalidArgument, Reason::kInvalidRequest, "", ""});
  EXPECT_NE(refused.message().find("9223372036854775807"), std::string::npos);
  EXPECT_TRUE(publisher->Publish(Version(5)).ok());
}

TEST_F(BadCall, RankOutsideTheWorldIsRefused) {
  const auto publisher = client::Publisher::Open(Place("trainer", 2, 2));
  ASSERT_FALSE(publisher.has_value());
  ExpectRefused(publisher.error(),
                {Code::kInvalidArgument, Reason::kInvalidRequest, "trainer/2", ""}, false);
}

TEST_F(BadCall, AnotherWorldSizeThanTheGroupsIsRefused) {
  auto first = OpenPublisher(0, 2);
  const auto second = client::Publisher::Open(Place("trainer", 1, 3));
  ASSERT_FALSE(second.has_value());
  ExpectRefused(second.error(), {Code::kInvalidArgument, Reason::kInvalidRequest, "trainer/1", ""},
                false);
}

TEST_F(BadCall, SecondTrainerIsRefused) {
  auto first = OpenPublisher();
  const auto second = client::Publisher::Open(Place("other-trainer"));
  ASSERT_FALSE(second.has_value());
  ExpectRefused(second.error(),
                {Code::kInvalidArgument, Reason::kInvalidRequest, "other-trainer/0", ""}, false);
}

TEST_F(BadCall, EmptyGroupIsRefused) {
  const auto publisher = client::Publisher::Open(Place(""));
  ASSERT_FALSE(publisher.has_value());
  EXPECT_EQ(ReasonName(publisher.error().reason()), ReasonName(Reason::kInvalidRequest));
  EXPECT_NE(publisher.error().message().find("group"), std::string::npos);
}

TEST_F(BadCall, GroupNameThatIsTooLongIsRefused) {
  const auto publisher = client::Publisher::Open(Place(std::string(129, 'x')));
  ASSERT_FALSE(publisher.has_value());
  EXPECT_EQ(ReasonName(publisher.error().reason()), ReasonName(Reason::kMessageTooLarge))
      << publisher.error().ToString();
}

TEST_F(BadCall, AnotherJobIsRefused) {
  client::Place place = Place("trainer");
  place.job = "somebody-elses";
  const auto publisher = client::Publisher::Open(place);
  ASSERT_FALSE(publisher.has_value());
  EXPECT_EQ(ReasonName(publisher.error().reason()), ReasonName(Reason::kInvalidRequest));
  EXPECT_NE(publisher.error().message().find("default"), std::string::npos)
      << publisher.error().ToString();
}

// ---- publishing

TEST_F(BadCall, PublishNamesTheRankThatWasLost) {
  Trainer trainer(daemon_.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine engine(daemon_.agent_socket(), "engine-a", TinyQwen2(), VllmTp1());
  trainer.Fill(1);
  trainer.Publish(3);
  engine.Install(3, 1);
  ASSERT_TRUE(trainer.AwaitReleases(3).ok());
  trainer.Close(2);
  daemon_.AwaitStatus([](const v1::StatusResponse& s) { return s.participants_size() == 4; },
                      "three trainer ranks and one engine rank");
  const Status status = trainer.rank(0).Publish(Version(5));
  EXPECT_EQ(CodeName(status.code()), CodeName(Code::kFailedPrecondition)) << status.ToString();
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kMissingRank)) << status.ToString();
  EXPECT_NE(status.message().find("trainer/2"), std::string::npos) << status.ToString();
  EXPECT_FALSE(status.remedy().empty());
  engine.ExpectServes(3, 1);
}

TEST_F(BadCall, ReleaseNamesTheRankThatNeverCame) {
  Engine engine(daemon_.agent_socket(), "engine-a", TinyQwen2(), VllmTp1());
  auto publisher = OpenPublisher(0, 2);
  client::Layout layout = Good();
  layout.spec = "megatron:tp1,pp1,dp2";
  const auto ranks = oracle::MegatronRanks(TinyQwen2(), oracle::HuggingFace(TinyQwen2(), 0),
                                           {1, 1, 2, {3}, 128, false});
  layout.observed.clear();
  for (const auto& [name, array] : ranks.at(0)) {
    layout.observed.push_back({name, layout::DType::kBF16, array.Shape()});
  }
  const Status bound = publisher->Bind(layout);
  ASSERT_TRUE(bound.ok()) << bound.ToString();
  client::PublishOptions options;
  options.deadline = std::chrono::milliseconds(200);
  const Status accepted = publisher->Publish(Version(3), options);
  ASSERT_TRUE(accepted.ok()) << accepted.ToString();
  const auto released = publisher->WaitReleased(Version(3), kPatience);
  ASSERT_FALSE(released.has_value());
  ExpectRefused(released.error(), {Code::kDeadlineExceeded, Reason::kMissingRank, "trainer/1", ""},
                false);
}

TEST_F(BadCall, ReleaseSaysThatNoEngineCame) {
  auto publisher = BoundPublisher();
  client::PublishOptions options;
  options.deadline = std::chrono::milliseconds(200);
  ASSERT_TRUE(publisher->Publish(Version(3), options).ok());
  const auto released = publisher->WaitReleased(Version(3), kPatience);
  ASSERT_FALSE(released.has_value());
  ExpectRefused(released.error(), {Code::kDeadlineExceeded, Reason::kNotReady, "", ""}, false);
}

TEST_F(BadCall, OldVersionIsRefused) {
  auto publisher = BoundPublisher();
  Engine engine(daemon_.agent_socket(), "engine-a", TinyQwen2(), VllmTp1());
  ASSERT_TRUE(publisher->Publish(Version(5)).ok());
  ASSERT_TRUE(publisher->WaitReleased(Version(5), kPatience).has_value());
  for (const uint64_t version : {5, 4, 1}) {
    ExpectRefused(publisher->Publish(Version(version)),
                  {Code::kFailedPrecondition, Reason::kStaleVersion, "trainer/0", ""});
  }
}

TEST_F(BadCall, SecondVersionWhileOneIsHeldIsRefused) {
  auto publisher = BoundPublisher();
  ASSERT_TRUE(publisher->Publish(Version(5)).ok());  // no engine: it stays held
  const Status status = publisher->Publish(Version(6));
  ExpectRefused(status, {Code::kFailedPrecondition, Reason::kNotReady, "trainer/0", ""});
}

// ---- fenced lifetimes

TEST_F(BadCall, FencedPublisherIsStale) {
  auto publisher = BoundPublisher();
  Evict("trainer");
  for (int call = 0; call < 2; ++call) {
    const Status status = publisher->Publish(Version(5));
    // The first call may reach the agent before the news of the eviction does.
    if (call == 0 && status.reason() == Reason::kMemberLost) continue;
    EXPECT_EQ(CodeName(status.code()), CodeName(Code::kFailedPrecondition)) << status.ToString();
    EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kStaleIncarnation))
        << status.ToString();
    EXPECT_FALSE(status.remedy().empty());
  }
}

TEST_F(BadCall, FencedProcessIsToldWhy) {
  RawAttachment attachment(daemon_, Hello("engine-a", 0, 2, v1::GROUP_ROLE_ENGINE));
  ASSERT_TRUE(attachment.Attached().has_value());
  Evict("engine-a");
  const auto event = attachment.Next();
  ASSERT_TRUE(event.has_value() && event->has_fenced());
  EXPECT_EQ(event->fenced().why().detail().reason(), v1::REASON_MEMBER_LOST);
  EXPECT_NE(event->fenced().why().message().find("a test"), std::string::npos);
  EXPECT_FALSE(attachment.Next().has_value());
}

TEST_F(BadCall, FencedIncarnationCannotRegisterAgain) {
  {
    RawAttachment attachment(daemon_, Hello("trainer", 0, 1, v1::GROUP_ROLE_TRAINER, 4711));
    ASSERT_TRUE(attachment.Attached().has_value());
    Evict("trainer");
    ASSERT_TRUE(attachment.Next().has_value());
  }
  ExpectRefused(Refused(Hello("trainer", 0, 1, v1::GROUP_ROLE_TRAINER, 4711)),
                {Code::kFailedPrecondition, Reason::kStaleIncarnation, "trainer/0", ""}, false);
}

TEST_F(BadCall, CallsWithAnUnknownHandleAreStale) {
  auto stub = daemon_.Agent();
  v1::PublishRequest publish;
  publish.set_handle(0xDEAD);
  publish.set_version(1);
  publish.set_mode(v1::PUBLISH_MODE_HOLD);
  publish.set_deadline_ms(1'000);
  v1::SubscribeRequest subscribe;
  subscribe.set_handle(0xDEAD);
  v1::AcknowledgeSwapRequest acknowledge;
  acknowledge.set_handle(0xDEAD);
  for (const Status& status : {Call(*stub, &v1::Agent::Stub::Publish, publish),
                               Call(*stub, &v1::Agent::Stub::Subscribe, subscribe),
                               Call(*stub, &v1::Agent::Stub::AcknowledgeSwap, acknowledge)}) {
    EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kStaleIncarnation))
        << status.ToString();
  }
}

TEST_F(BadCall, ReportsOfAnotherIncarnationChangeNothing) {
  Trainer trainer(daemon_.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine engine(daemon_.agent_socket(), "engine-a", TinyQwen2(), VllmTp1());
  const v1::StatusResponse before = daemon_.GetStatus();
  auto stub = daemon_.Coordinator();
  for (const auto& participant : before.participants()) {
    v1::ReportRequest report;
    report.set_agent(participant.agent());
    *report.mutable_member() = participant.member();
    report.mutable_member()->set_incarnation(participant.member().incarnation() + 1);
    report.mutable_lost()->mutable_why()->set_code(10);
    report.mutable_lost()->mutable_why()->mutable_detail()->set_reason(v1::REASON_MEMBER_LOST);
    const Status status = Call(*stub, &v1::Coordinator::Stub::Report, report);
    EXPECT_TRUE(status.ok() || status.reason() == Reason::kStaleIncarnation) << status.ToString();
    v1::PublishVersionRequest publish;
    *publish.mutable_member() = report.member();
    publish.set_version(9);
    publish.set_deadline_ms(1'000);
    EXPECT_EQ(ReasonName(Call(*stub, &v1::Coordinator::Stub::PublishVersion, publish).reason()),
              ReasonName(Reason::kStaleIncarnation));
  }
  EXPECT_EQ(daemon_.GetStatus().participants_size(), before.participants_size());
  EXPECT_NE(daemon_.HttpGet("/metrics").find("weightwire_fenced_requests_total"),
            std::string::npos);
}

// ---- what a raw client may send

TEST_F(BadCall, UnknownEnumValuesAreRefused) {
  v1::AttachUp hello = Hello("trainer", 0, 1);
  hello.mutable_hello()->set_role(static_cast<v1::GroupRole>(77));
  const Status role = Refused(hello);
  ExpectRefused(role, {Code::kInvalidArgument, Reason::kUnknownEnum, "", ""});
  EXPECT_NE(role.message().find("hello.role: value 77"), std::string::npos) << role.message();

  RawAttachment attachment(daemon_, Hello("trainer", 0, 1));
  const auto handle = attachment.Attached();
  ASSERT_TRUE(handle.has_value());
  auto stub = daemon_.Agent();
  v1::PublishRequest publish;
  publish.set_handle(*handle);
  publish.set_version(1);
  publish.set_deadline_ms(1'000);
  publish.set_mode(static_cast<v1::PublishMode>(77));
  ExpectRefused(Call(*stub, &v1::Agent::Stub::Publish, publish),
                {Code::kInvalidArgument, Reason::kUnknownEnum, "", ""});
  v1::AgentLayoutRequest layout;
  layout.set_handle(*handle);
  auto* scheme = layout.mutable_layout()->mutable_scheme();
  scheme->mutable_topology()->set_spec("hf");
  auto* tensor = scheme->add_observed();
  tensor->set_name("w");
  tensor->set_dtype(static_cast<v1::DType>(77));
  ExpectRefused(Call(*stub, &v1::Agent::Stub::SubmitLayout, layout),
                {Code::kInvalidArgument, Reason::kUnknownEnum, "", "w"});
}

TEST_F(BadCall, StreamWithoutHelloIsRefused) {
  v1::AttachUp up;
  up.mutable_detach();
  ExpectRefused(Refused(up), {Code::kInvalidArgument, Reason::kInvalidRequest, "", ""}, false);
  ExpectRefused(Refused(v1::AttachUp()), {Code::kInvalidArgument, Reason::kInvalidRequest, "", ""},
                false);
}

TEST_F(BadCall, ProtocolOfTheFutureIsRefused) {
  v1::AttachUp up = Hello("trainer", 0, 1);
  up.mutable_hello()->mutable_protocol()->set_min(7);
  up.mutable_hello()->mutable_protocol()->set_max(9);
  const Status status = Refused(up);
  ExpectRefused(status, {Code::kFailedPrecondition, Reason::kProtocolVersion, "", ""});
  EXPECT_NE(status.message().find("7 to 9"), std::string::npos) << status.message();
}

TEST_F(BadCall, LayoutWithoutContentIsRefused) {
  RawAttachment attachment(daemon_, Hello("trainer", 0, 1));
  v1::AgentLayoutRequest layout;
  layout.set_handle(attachment.Attached().value_or(0));
  auto stub = daemon_.Agent();
  ExpectRefused(Call(*stub, &v1::Agent::Stub::SubmitLayout, layout),
                {Code::kInvalidArgument, Reason::kInvalidRequest, "", ""}, false);
}

TEST_F(BadCall, FdTokenThatNobodyGaveIsRefused) {
  RawAttachment attachment(daemon_, Hello("trainer", 0, 1));
  v1::ImportMemoryRequest import;
  import.set_handle(attachment.Attached().value_or(0));
  import.add_regions()->set_fd_token(12'345);
  auto stub = daemon_.Agent();
  const Status status = Call(*stub, &v1::Agent::Stub::ImportMemory, import);
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kNotRegistered)) << status.ToString();
  EXPECT_FALSE(status.remedy().empty());
}

TEST_F(BadCall, OperatorsAreToldWhatDoesNotExist) {
  auto stub = daemon_.Coordinator();
  v1::CommitRequest commit;
  commit.set_epoch(99);
  v1::AbortRequest abort;
  abort.set_epoch(99);
  v1::EvictRequest evict;
  evict.set_group("nobody");
  v1::ExplainPlanRequest explain;
  explain.set_engine("nobody");
  for (const Status& status : {Call(*stub, &v1::Coordinator::Stub::Commit, commit),
                               Call(*stub, &v1::Coordinator::Stub::Abort, abort),
                               Call(*stub, &v1::Coordinator::Stub::Evict, evict),
                               Call(*stub, &v1::Coordinator::Stub::ExplainPlan, explain)}) {
    EXPECT_EQ(CodeName(status.code()), CodeName(Code::kNotFound)) << status.ToString();
    EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kNotRegistered));
  }
}

class SmallMessages : public BadInput {
 protected:
  static constexpr size_t kLimit = 65'536;
  SmallMessages() : BadInput({"--message-bytes-max=" + std::to_string(kLimit)}) {}

  Status SubmitConfigOf(size_t bytes) {
    client::Layout layout =
        SchemeLayout(TinyQwen2(), HuggingFaceWhole(), oracle::HuggingFace(TinyQwen2(), 0));
    layout.config_json.resize(bytes, ' ');
    auto publisher = OpenPublisher();
    return publisher->Bind(layout);
  }
};

TEST_F(SmallMessages, MessageOverTheLimitIsRefusedWithTheLimit) {
  const Status status = SubmitConfigOf(kLimit + 1);
  ExpectRefused(status, {Code::kResourceExhausted, Reason::kMessageTooLarge, "", ""});
  EXPECT_NE(status.message().find("65536"), std::string::npos) << status.message();
}

TEST_F(SmallMessages, MessageFarOverTheLimitIsRefusedUnread) {
  ExpectRefused(SubmitConfigOf(4 * kLimit),
                {Code::kResourceExhausted, Reason::kMessageTooLarge, "", ""}, false);
}

}  // namespace
}  // namespace weightwire::integration
