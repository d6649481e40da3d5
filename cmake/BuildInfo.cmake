# df_write_build_info(missing ort_source cuda_archs cuda_note): what was built and what was not, for the Python side.
function(df_json_string text out)
  string(REPLACE "\\" "\\\\" text "${text}")
  string(REPLACE "\"" "\\\"" text "${text}")
  string(REPLACE "\n" "\\n" text "${text}")
  set(${out} "\"${text}\"" PARENT_SCOPE)
endfunction()

function(df_write_build_info missing ort_source cuda_archs cuda_note)
  if(missing)
    set(native false)
  else()
    set(native true)
  endif()
  set(archs "")
  foreach(arch IN LISTS cuda_archs)
    list(APPEND archs "\"${arch}\"")
  endforeach()
  string(REPLACE ";" ", " archs "${archs}")
  df_json_string("${missing}" missing)
  df_json_string("${ort_source}" ort_source)
  df_json_string("${cuda_note}" cuda_note)
  file(
    WRITE "${CMAKE_CURRENT_BINARY_DIR}/_build_info.json"
    "{\n"
    "  \"version\": \"${DELTAFUSE_VERSION}\",\n"
    "  \"native\": ${native},\n"
    "  \"missing\": ${missing},\n"
    "  \"ort_headers\": ${ort_source},\n"
    "  \"cuda_archs\": [${archs}],\n"
    "  \"cuda_note\": ${cuda_note}\n"
    "}\n")
endfunction()
