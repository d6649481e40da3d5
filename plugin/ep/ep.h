// The execution provider of one session, on one device.
#pragma once

#include <memory>
#include <string>

#include "device.h"
#include "ort.h"
#include "session.h"

namespace deltafuse::ep {

class Ep final : public OrtEp {
 public:
  // `registry` belongs to the factory.
  Ep(std::shared_ptr<Session> session, const OrtKernelRegistry* registry, const OrtLogger* logger);
  ~Ep();
  Ep(const Ep&) = delete;
  Ep& operator=(const Ep&) = delete;

  const std::shared_ptr<Session>& session() const { return session_; }

 private:
  OrtStatus* FindNodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support);
  OrtStatus* ConsiderNode(const OrtNode* node, OrtEpGraphSupportInfo* support);
  OrtStatus* Refuse(const OrtNode* node, const std::string& reason);

  const std::shared_ptr<Session> session_;
  const Api& api_;
  const Device& device_;
  const OrtKernelRegistry* registry_;
  const OrtLogger* logger_;
};

}  // namespace deltafuse::ep
