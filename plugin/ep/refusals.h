// Why nodes were not taken, kept for as long as the EP that refused them lives, for the Python side to ask.
#pragma once

#include <string>
#include <vector>

namespace deltafuse::ep {

struct NodeRefusal {
  std::string domain;
  std::string op_type;
  std::string node;    // the node's name, which may be empty
  std::string output;  // its first output's name: identifies a node without a name
  std::string reason;
};

// `owner` is the EP; `tag` is the session's own name for it (EP option session_tag). False if it was there already.
bool RecordRefusal(const void* owner, const std::string& tag, const NodeRefusal& refusal);

void ForgetRefusals(const void* owner);

// Those of all living EPs with this tag; of all EPs when `tag` is empty.
std::vector<NodeRefusal> Refusals(const std::string& tag);

}  // namespace deltafuse::ep
