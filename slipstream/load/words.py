"""Words of synthetic prompts: common and short, so that most vocabularies have each as one token with its space."""

from __future__ import annotations

_TEXT = """
    about above across after again against air all almost alone along also always among and animal answer any area
    around ask away back base bed been before began begin being best better between big bird black blue board boat
    body book both box boy bring brought brown build but buy call came can car care carry case cause center change
    check children city class clear close cold color come common complete cook corn correct could country course
    cover cross cut dark day deep did different direct distance do dog door down draw dream drive dry during each
    early earth ease east eat end enough equal even ever every example eye face fact fall family far farm fast father
    feel feet few field figure fill final find fine fire first fish five fly follow food foot for force form found
    four free friend from front full game gave get girl give glass go gold good got govern great green ground group
    grow had half hand happen hard has have he head hear heart heat heavy help her here high him his hold home horse
    hot hour house how hundred idea if in inch industry interest island it just keep kind king knew know land
    language large last late laugh law lay lead learn leave left length less let letter life light like line list
    listen little live long look lost love low machine made main make man many map mark matter may mean measure
    member men might mile mind minute miss money moon more morning most mother mountain move much music must name
    near need never new next night no north note nothing notice noun now number object ocean off often oil old on
    once one only open or order other our out over own page paint pair paper part pass past pattern people perhaps
    person picture piece place plain plan plane plant play point port possible pound power present press problem
    produce product pull push put question quick rain ran reach read ready real record red remember rest right river
    road rock roll room round rule run said sail same saw say school science sea second see seem self sentence serve
    set several shape she ship short should show side simple since sing sit six size sleep slow small snow so some
    song soon sound south special spell spring stand star start state stay step still stone stood stop store story
    street strong study such summer sun sure surface system table take talk teach tell ten test than that the their
    them then there these they thing think this those though thought thousand three through time together told too
    took top toward town travel tree true try turn two under unit until up upon use usual value verb very voice vowel
    walk wall want war warm was watch water way we week well went were west what wheel when where which while white
    who whole why will wind winter with wonder wood word work world would write year you young your
"""
WORDS = tuple(_TEXT.split())
